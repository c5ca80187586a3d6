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
    """The devices that a configuration asks for.

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
    is_possible = bool(trainer_gpus(devices.trainer, devices.num_processes)) or not devices.needs_gpu
    fix = f"weight_sync={devices.strategy} moves weights from GPU to GPU, and training is on the CPU"
    require(is_possible, "model.device", devices.trainer, f"{fix}; use weight_sync=shared_vllm or reload there")


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
    fix = f"{devices.num_processes} processes train, each with a reference beside its model; use model.ref_device=null"
    require(devices.num_processes == 1, "model.ref_device", devices.reference, fix)
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
    rule, name = devices.rule, devices.strategy
    gpus = engine_gpus(configured, rule, name=name, trainers=trainers, num_gpus=num_gpus, num_wanted=num_servers * each)
    if gpus is None and (num_servers == 1 or num_gpus == 0):
        return [None] * num_servers
    if gpus is None:
        gpus = list(range(num_gpus)[: num_servers * each])
    elif configured is None and rule == "same":
        gpus = gpus * num_servers  # there is no other GPU for them
    value, size = _value(configured), len(gpus) // num_servers
    fix = f"{len(gpus)} GPUs cannot be shared out among {num_servers} servers (placement.num_engines) with {each} each"
    is_even = len(gpus) % num_servers == 0 and size >= each
    require(num_servers == 1 or is_even, KEY, value, f"{fix} (engine.args.tensor_parallel_size)")
    shares = [gpus[i * size : (i + 1) * size] for i in range(num_servers)]
    for share in shares:
        fix = f"one server would have {share}; name each GPU once for each server"
        require(len(set(share)) == len(share), KEY, value, fix)
        if rule == "same" and trainers:
            _check_same(trainers[0] in share, value, name, trainers[0])
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
    value = _value(configured)
    exist = all(0 <= gpu < num_gpus for gpu in configured or ())
    require(exist, KEY, value, f"this machine has {num_gpus} GPUs, numbered from 0; name some of them, or use null")
    if not trainers:
        return None if configured is None else list(configured)
    free = [gpu for gpu in range(num_gpus) if gpu not in trainers]
    if configured is None:
        fix = f"weight_sync={name} needs a GPU for the server that no process trains on; use weight_sync=shared_vllm"
        require(rule != "other" or bool(free), KEY, value, fix)
        return [trainers[0]] if rule == "same" or not free else free[:num_wanted]
    if rule == "same":
        _check_same(trainers[0] in configured, value, name, trainers[0])
    shared = sorted(set(configured) & set(trainers))
    if rule == "other":
        fix = f"placement.engine_devices={free[:1]}" if free else "weight_sync=shared_vllm"
        fix = f"weight_sync={name} needs other GPUs for the server; GPU {shared[:1]} is trained on; use {fix}"
        require(not shared, KEY, value, fix)
    return list(configured)


def _check_same(is_same: bool, value: object, name: str, gpu: int) -> None:
    fix = f"weight_sync={name} needs every server on the trainer's GPU {gpu}; use null, or weight_sync=nccl"
    require(is_same, KEY, value, fix)


def _value(configured: Sequence[int] | None) -> object:
    return "null" if configured is None else list(configured)
