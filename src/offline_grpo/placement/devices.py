"""Who computes where: the GPUs of the training processes, of the reference, and of the servers that the run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offline_grpo.errors import ConfigError
from offline_grpo.model.device import resolve_device


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Who wants which device.

    Args:
        trainer: `model.device`.
        reference: `model.ref_device`, None for the trainer's.
        num_processes: that train.
        num_servers: that the run starts.
        gpus_per_server: over which each splits its model.
        engine_devices: `placement.engine_devices`.
        strategy: the option of `weight_sync`, for messages.
        rule: see `engine_gpus`.
        needs_gpu: the strategy moves weights from GPU to GPU alone.
    """

    trainer: str
    reference: str | None
    num_processes: int
    num_servers: int
    gpus_per_server: int
    engine_devices: Sequence[int] | None
    strategy: str
    rule: str
    needs_gpu: bool


def check_devices(devices: Devices) -> None:
    """Refuse devices that do not exist or do not suit the strategy, before any model is made.

    Raises:
        ConfigError: names key, value and fix.
    """
    reference_gpu(devices)
    server_gpus(devices)
    if not trainer_gpus(devices.trainer, devices.num_processes) and devices.needs_gpu:
        raise ConfigError(
            f"model.device={devices.trainer}: weight_sync={devices.strategy} moves weights from GPU to GPU, and "
            "training is on the CPU; use weight_sync=shared_vllm or reload there"
        )


def trainer_gpus(device: str, num_processes: int) -> list[int]:
    """The GPU of every training process, that of the first one first; empty on the CPU.

    Args:
        device: `model.device`.

    Raises:
        ConfigError: a GPU that this machine has not.
    """
    devices = [resolve_device(device, process) for process in range(num_processes)]
    return [device.index or 0 for device in devices if device.type == "cuda"]


def reference_gpu(devices: Devices) -> int | None:
    """The GPU that the reference has for itself; None where it is on the trainer's, or on the CPU.

    Raises:
        ConfigError: a device that this machine has not; or several training processes, each of which has a reference of
        its own.
    """
    if devices.reference is None:
        return None
    device = resolve_device(devices.reference, key="model.ref_device")
    if devices.num_processes > 1:
        raise ConfigError(
            f"model.ref_device={devices.reference}: {devices.num_processes} processes train, and each has a reference "
            "beside its model; use model.ref_device=null, or train in one process"
        )
    gpu = None if device.type == "cpu" else device.index or 0
    return None if gpu in trainer_gpus(devices.trainer, 1) else gpu


def server_gpus(devices: Devices) -> list[list[int] | None]:
    """The GPUs of each server that the run starts; None for one that may use all that it sees.

    Raises:
        ConfigError: GPUs that do not exist, break the strategy's rule, or cannot be shared out in equal parts.
    """
    num_servers, each, configured = devices.num_servers, devices.gpus_per_server, devices.engine_devices
    if num_servers == 0:
        return []
    trainers, num_gpus = trainer_gpus(devices.trainer, devices.num_processes), torch.cuda.device_count()
    gpus = engine_gpus(
        configured,
        devices.rule,
        name=devices.strategy,
        trainers=trainers,
        num_gpus=num_gpus,
        num_wanted=num_servers * each,
    )
    if gpus is None and (num_servers == 1 or num_gpus == 0):
        return [None] * num_servers
    if gpus is None:
        gpus = list(range(num_gpus)[: num_servers * each])
    elif configured is None and devices.rule == "same":
        gpus = gpus * num_servers  # there is no other GPU for them
    setting, size = _setting(configured), len(gpus) // num_servers
    if num_servers > 1 and (len(gpus) % num_servers or size < each):
        raise ConfigError(
            f"{setting}: {len(gpus)} GPUs cannot be shared out among placement.num_engines={num_servers} servers with "
            f"{each} each (engine.args.tensor_parallel_size); name {num_servers * each}, or start fewer servers. A GPU "
            "that is named several times has several servers"
        )
    shares = [gpus[i * size : (i + 1) * size] for i in range(num_servers)]
    for share in shares:
        if len(set(share)) < len(share):
            raise ConfigError(f"{setting}: one server would have {share}; name each GPU once for each server")
        if devices.rule == "same" and trainers and trainers[0] not in share:
            raise ConfigError(
                f"{setting}: weight_sync={devices.strategy} needs every server on the trainer's GPU {trainers[0]}; use "
                "placement.engine_devices=null, or weight_sync=nccl"
            )
    return [*shares]


def engine_gpus(
    configured: Sequence[int] | None,
    rule: str,
    *,
    name: str,
    trainers: Sequence[int],
    num_gpus: int,
    num_wanted: int = 1,
) -> list[int] | None:
    """The GPUs of the servers that the run starts, numbered as this process sees them; None (all that it sees) for
    trainers on the CPU.

    Args:
        configured: `placement.engine_devices`; null takes the trainer's GPU for the rule "same", else the first
            `num_wanted` that no process trains on, else (rule "any") the trainer's.
        rule: "same" where weights never leave the trainer's GPU, "other" where they must, "any".
        name: of the strategy with that rule.
        trainers: the GPU of every training process, that of the first one first.

    Raises:
        ConfigError: GPUs that do not exist or break the rule.
    """
    setting = _setting(configured)
    if not all(0 <= gpu < num_gpus for gpu in configured or ()):
        raise ConfigError(
            f"{setting}: this machine has {num_gpus} GPUs, numbered from 0; name some of them, or use "
            "placement.engine_devices=null"
        )
    if not trainers:
        return None if configured is None else list(configured)
    free = [gpu for gpu in range(num_gpus) if gpu not in trainers]
    if configured is None:
        if rule == "other" and not free:
            raise ConfigError(
                f"{setting}: weight_sync={name} needs a GPU for the server that no process trains on, and all "
                f"{num_gpus} of this machine are trained on; use weight_sync=shared_vllm, or fewer training processes"
            )
        return [trainers[0]] if rule == "same" or not free else free[:num_wanted]
    if rule == "same" and trainers[0] not in configured:
        raise ConfigError(
            f"{setting}: weight_sync={name} needs the server on the trainer's GPU {trainers[0]}; use "
            "placement.engine_devices=null, or weight_sync=nccl"
        )
    shared = sorted(set(configured) & set(trainers))
    if rule == "other" and shared:
        fix = f"placement.engine_devices={free[:1]}" if free else "weight_sync=shared_vllm"
        raise ConfigError(
            f"{setting}: weight_sync={name} needs other GPUs for the server; GPU {shared[0]} is trained on; use {fix}"
        )
    return list(configured)


def _setting(configured: Sequence[int] | None) -> str:
    return f"placement.engine_devices={'null' if configured is None else list(configured)}"
