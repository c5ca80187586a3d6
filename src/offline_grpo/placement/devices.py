"""Who computes where: the GPUs of the training processes, of the reference, and of the servers that the run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offline_grpo.errors import ConfigError
from offline_grpo.model.device import resolve_device

KEY = "placement.engine_devices"


@dataclass(frozen=True)
class Devices:
    """The GPUs of a run, numbered as this process sees them."""

    trainers: Sequence[int]  # of every training process, that of the first one first; empty on the CPU
    reference: int | None  # that the reference has for itself; None where it is on the trainer's, or on the CPU
    servers: Sequence[Sequence[int] | None]  # of each server that the run starts; None for one that may use all


def place(
    *,
    trainer: str,
    reference: str | None,
    num_processes: int,
    num_servers: int,
    gpus_per_server: int,
    engine_devices: Sequence[int] | None,
    strategy: str,
    rule: str,
    needs_gpu: bool,
) -> Devices:
    """The GPUs that a configuration asks for. Without `placement.engine_devices`, servers have the trainer's GPU for
    the rule "same", else the first that no process trains on, else (rule "any") the trainer's.

    Args:
        trainer, reference: `model.device`, and `model.ref_device`.
        strategy: the option of `weight_sync`, for messages.
        rule: "same" where weights never leave the trainer's GPU, "other" where they must, "any".
        needs_gpu: the strategy moves weights from GPU to GPU alone.

    Raises ConfigError for GPUs that do not exist, that break the rule, or that cannot be shared out in equal parts.
    """
    processes = [resolve_device(trainer, process) for process in range(num_processes)]
    trainers = [device.index or 0 for device in processes if device.type == "cuda"]

    # The reference may have a GPU of its own, but each process would want its own reference there.
    reference_gpu = None
    if reference is not None:
        device = resolve_device(reference, key="model.ref_device")
        if num_processes > 1:
            fix = f"{num_processes} processes train, each with a reference beside its model; use model.ref_device=null"
            raise ConfigError("model.ref_device", reference, fix)
        gpu = None if device.type == "cpu" else device.index or 0
        reference_gpu = None if gpu in trainers else gpu

    # Servers have the GPUs that are named, or those that the rule leads to.
    num_gpus, each = torch.cuda.device_count(), gpus_per_server
    free = [gpu for gpu in range(num_gpus) if gpu not in trainers]
    if engine_devices is not None:
        gpus = list(engine_devices)
    elif rule == "same" and trainers:
        gpus = [trainers[0]] * num_servers
    else:
        gpus = free[: num_servers * each] or ([trainers[0]] if rule == "any" and trainers else [])
    servers: list[list[int] | None] = [None] * num_servers
    if num_servers > 0 and (engine_devices is not None or trainers or (num_servers > 1 and num_gpus > 0)):
        value = "null" if engine_devices is None else gpus

        # They exist, and where weights have to travel between GPUs, none of them trains.
        if not all(0 <= gpu < num_gpus for gpu in gpus):
            raise ConfigError(KEY, value, f"this machine has {num_gpus} GPUs, numbered from 0; use null")
        if rule == "other" and (not gpus or {*gpus} & {*trainers}):
            fix = f"{KEY}={free[: num_servers * each]}" if free else "weight_sync=shared_vllm"
            fix = f"weight_sync={strategy} needs GPUs that no process trains on; use {fix}"
            raise ConfigError(KEY, value, fix)

        # Each server has equally many, none twice, and where weights never leave the trainer's GPU, that one too.
        size = len(gpus) // num_servers
        if num_servers > 1 and (len(gpus) % num_servers or size < each):
            fix = f"{len(gpus)} GPUs cannot be shared out among {num_servers} servers (placement.num_engines) with "
            raise ConfigError(KEY, value, f"{fix}{each} each (engine.args.tensor_parallel_size)")
        shares = [gpus[i * size : (i + 1) * size] for i in range(num_servers)]
        for share in shares:
            if len({*share}) < len(share):
                raise ConfigError(KEY, value, f"one server would have {share}; name each GPU once for each server")
            if rule == "same" and trainers and trainers[0] not in share:
                fix = f"weight_sync={strategy} needs every server on the trainer's GPU {trainers[:1]}"
                raise ConfigError(KEY, value, f"{fix}; use null, or weight_sync=nccl")
        servers = [*shares]

    if needs_gpu and not trainers:
        fix = f"weight_sync={strategy} moves weights from GPU to GPU, and training is on the CPU"
        raise ConfigError("model.device", trainer, f"{fix}; use weight_sync=shared_vllm or reload there")
    return Devices(trainers, reference_gpu, servers)
