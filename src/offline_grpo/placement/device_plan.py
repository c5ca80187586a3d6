"""The parts that a GPU's memory is predicted to hold: as a table, as a refusal where they cannot fit, and as advice
where they did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from offline_grpo.errors import ConfigError

GIB = 2**30
KV_CACHE_FLOOR = 1.1  # a server's share is at least this many times its weights
ACTIVATIONS = "activations"
CONTEXT = "CUDA context"
SAMPLING = "KV cache of sampling, beyond gradients and activations"


@dataclass(frozen=True)
class Part:
    """Memory on a GPU, the setting (KEY=VALUE) that it follows from, and what to do if it is too much."""

    name: str
    num_bytes: int
    setting: str
    fix: str


@dataclass(frozen=True)
class DevicePlan:
    """A GPU's parts: those of its training processes, and those of its servers (see `_server_parts`), empty where it
    has none.

    The host has a plan, too, where it holds what GPUs would hold otherwise. Its `gpu` is None.
    """

    gpu: int | None
    total_bytes: int
    trainer: tuple[Part, ...]
    server: tuple[Part, ...]
    num_servers: int = 1  # that `server` adds up

    @property
    def name(self) -> str:
        return "the host" if self.gpu is None else f"GPU {self.gpu}"

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.trainer + self.server

    @property
    def needed_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def describe(devices: Sequence[DevicePlan]) -> list[str]:
    """A small table: one line per part, in GiB."""
    lines = []
    for device in devices:
        lines.append(
            f"{device.name}: predicted to hold {_gib(device.needed_bytes)} of {_gib(device.total_bytes)} at its fullest"
        )
        lines += [f"  {part.num_bytes / GIB:8.2f} GiB  {part.name}" for part in device.parts]
    return lines


def check(devices: Sequence[DevicePlan]) -> None:
    """Refuse what cannot fit.

    Raises:
        ConfigError: names the setting whose change helps most; `placement.check_memory=false` goes without this check.
    """
    for device in devices:
        if device.server:
            _check_server(device)
        if device.needed_bytes > device.total_bytes:
            raise ConfigError(_refusal(device))


def _check_server(device: DevicePlan) -> None:
    weights, rest = device.server[0], device.server[1]
    share = weights.num_bytes + rest.num_bytes
    if share < weights.num_bytes * KV_CACHE_FLOOR:
        least = ceil(weights.num_bytes * KV_CACHE_FLOOR / device.num_servers / device.total_bytes * 100) / 100
        fix = (
            f"use {least:.2f} or more"
            if least <= 1
            else "it needs several GPUs (placement.engine_devices), or a smaller model"
        )
        raise ConfigError(
            f"{rest.setting}: that share of GPU {device.gpu}, {_gib(share / device.num_servers)}, holds the server's "
            f"weights of {_gib(weights.num_bytes / device.num_servers)} and "
            f"hardly any KV cache; {fix}"
        )


def _refusal(device: DevicePlan) -> str:
    largest = max(device.trainer or device.server, key=lambda part: part.num_bytes)
    setting, fix = largest.setting, largest.fix
    if device.server and (room := room_for_server(device, total_bytes=device.total_bytes)) is not None:
        rest = device.server[1]
        setting, fix = rest.setting, f"use {rest.setting.partition('=')[0]}={room:.2f} or less"
    return (
        f"{setting}: {device.name} has {_gib(device.total_bytes)} and would have to hold {_gib(device.needed_bytes)} "
        f"({largest_parts(device)}); {fix}; placement.check_memory=false starts all the same"
    )


def largest_parts(device: DevicePlan) -> str:
    """`activations 40.1 GiB, optimizer state 11.5 GiB, ...`"""
    return (
        ", ".join(
            f"{part.name} {_gib(part.num_bytes)}" for part in sorted(device.parts, key=lambda part: -part.num_bytes)[:4]
        )
        + ", ..."
    )


def advice(device: DevicePlan, phase: str) -> list[str]:
    """Three settings that make the GPU's parts smaller, each with what to do: that of the part that `phase` makes
    first, then the largest.

    Args:
        phase: of the run, such as "generate" or "train".
    """
    made = {"generate": SAMPLING, "eval": SAMPLING, "train": ACTIVATIONS}.get(phase)
    parts = sorted(device.parts, key=lambda part: (part.name != made, part.name == CONTEXT, -part.num_bytes))
    return list(dict.fromkeys(f"{part.setting}: {part.fix}" for part in parts))[:3]


def room_for_server(device: DevicePlan, *, total_bytes: int) -> float | None:
    """The largest share of a GPU of `total_bytes` that each server may have beside the trainer; None if its weights
    need more.
    """
    weights, _, context = device.server
    trainer_bytes = sum(part.num_bytes for part in device.trainer)
    room = floor((total_bytes - trainer_bytes - context.num_bytes) / device.num_servers / total_bytes * 100) / 100
    return room if device.num_servers * room * total_bytes >= weights.num_bytes * KV_CACHE_FLOOR else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
