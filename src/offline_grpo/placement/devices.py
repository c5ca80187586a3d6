"""Who computes where: the GPUs of the training processes, of the reference, and of the servers that the run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offline_grpo.errors import require
from offline_grpo.model.device import resolve_device

KEY = "placement.engine_devices"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a configuration asks for."""

    trainer: str  # `model.device`
    reference: str | None  # `model.ref_device`, None for the trainer's
    num_processes: int  # that train
    num_servers: int  # that the run starts
    gpus_per_server: int  # over which each splits its model
    engine_devices: Sequence[int] | None  # `placement.engine_devices`
    strategy: str  # the option of `weight_sync`, for messages
    rule: str  # "same" where weights never leave the trainer's GPU, "other" where they must, "any"
    needs_gpu: bool  # the strategy moves weights from GPU to GPU alone


def check_devices(devices: Devices) -> None:
    """Refuse devices that do not exist or do not suit the strategy, before any model is made.

    Raises:
        ConfigError: names key, value and fix.
    """
    reference_gpu(devices)
    server_gpus(devices)
    is_possible = bool(trainer_gpus(devices.trainer, devices.num_processes)) or not devices.needs_gpu
    fix = f"weight_sync={devices.strategy} moves weights from GPU to GPU, and training is on the CPU"
    require(is_possible, "model.device", devices.trainer, f"{fix}; use weight_sync=shared_vllm or reload there")


def trainer_gpus(device: str, num_processes: int) -> list[int]:
    """The GPU of every training process, that of the first one first; empty on the CPU. `device`: `model.device`.

    Raises:
        ConfigError: a GPU that this machine has not.
    """
    devices = [resolve_device(device, process) for process in range(num_processes)]
    return [device.index or 0 for device in devices if device.type == "cuda"]


def reference_gpu(devices: Devices) -> int | None:
    """The GPU that the reference has for itself; None where it is on the trainer's, or on the CPU.

    Raises:
        ConfigError: this machine has no such device, or several processes train, each with a reference of its own.
    """
    if devices.reference is None:
        return None
    device = resolve_device(devices.reference, key="model.ref_device")
    fix = f"{devices.num_processes} processes train, each with a reference beside its model; use model.ref_device=null"
    require(devices.num_processes == 1, "model.ref_device", devices.reference, fix)
    gpu = None if device.type == "cpu" else device.index or 0
    return None if gpu in trainer_gpus(devices.trainer, 1) else gpu


def server_gpus(devices: Devices) -> list[list[int] | None]:
    """The GPUs of each server that the run starts, numbered as this process sees them; None for one that may use all.

    Without `placement.engine_devices` these are the trainer's GPU for the rule "same", else the first that no process
    trains on, else (rule "any") the trainer's.

    Raises:
        ConfigError: GPUs that do not exist, break the strategy's rule, or cannot be shared out in equal parts.
    """
    num_servers, each, rule = devices.num_servers, devices.gpus_per_server, devices.rule
    if num_servers == 0:
        return []
    trainers, num_gpus = trainer_gpus(devices.trainer, devices.num_processes), torch.cuda.device_count()
    free = [gpu for gpu in range(num_gpus) if gpu not in trainers]
    if devices.engine_devices is not None:
        gpus = list(devices.engine_devices)
    elif not trainers:
        if num_servers == 1 or num_gpus == 0:
            return [None] * num_servers
        gpus = free[: num_servers * each]
    elif rule == "same":
        gpus = [trainers[0]] * num_servers
    else:
        gpus = free[: num_servers * each] or ([trainers[0]] if rule == "any" else [])

    def check(is_good: bool, fix: str) -> None:
        require(is_good, KEY, "null" if devices.engine_devices is None else gpus, fix)

    check(all(0 <= gpu < num_gpus for gpu in gpus), f"this machine has {num_gpus} GPUs, numbered from 0; use null")
    if rule == "other":
        fix = f"{KEY}={free[: num_servers * each]}" if free else "weight_sync=shared_vllm"
        on_own = bool(gpus) and not {*gpus} & {*trainers}
        check(on_own, f"weight_sync={devices.strategy} needs GPUs that no process trains on; use {fix}")
    size = len(gpus) // num_servers
    fix = f"{len(gpus)} GPUs cannot be shared out among {num_servers} servers (placement.num_engines) with {each} each"
    is_even = len(gpus) % num_servers == 0 and size >= each
    check(num_servers == 1 or is_even, f"{fix} (engine.args.tensor_parallel_size)")
    shares = [gpus[i * size : (i + 1) * size] for i in range(num_servers)]
    for share in shares:
        check(len({*share}) == len(share), f"one server would have {share}; name each GPU once for each server")
        is_there = rule != "same" or not trainers or trainers[0] in share
        fix = f"weight_sync={devices.strategy} needs every server on the trainer's GPU {trainers[:1]}"
        check(is_there, f"{fix}; use null, or weight_sync=nccl")
    return [*shares]
