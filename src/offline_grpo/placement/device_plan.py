"""The parts that a GPU's memory is predicted to hold: as a table, and as a refusal where they cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from offline_grpo.errors import ConfigError

GIB = 2**30
KV_CACHE_FLOOR = 1.1  # a server's share is at least this many times its weights


@dataclass(frozen=True)
class Part:
    """Memory on a GPU, the setting (KEY=VALUE) that it follows from, and what to do if it is too much."""

    name: str
    num_bytes: int
    setting: str
    fix: str


@dataclass(frozen=True)
class DevicePlan:
    """A GPU's parts: those of its training processes, and of its servers weights, the rest of their share, and contexts
    (empty where it has none). The host has a plan, too, where it holds offloaded state; its `gpu` is None.
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
        needed, total = _gib(device.needed_bytes), _gib(device.total_bytes)
        lines.append(f"{device.name}: predicted to hold {needed} of {total} at its fullest")
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
    weights, rest, _ = device.server
    share, least = weights.num_bytes + rest.num_bytes, weights.num_bytes * KV_CACHE_FLOOR
    if share < least:
        least = ceil(least / device.num_servers / device.total_bytes * 100) / 100
        fix = f"use {least:.2f} or more" if least <= 1 else "use several GPUs (placement.engine_devices)"
        raise ConfigError(
            f"{rest.setting}: that share of GPU {device.gpu}, {_gib(share / device.num_servers)}, leaves hardly any KV "
            f"cache beside the weights of {_gib(weights.num_bytes / device.num_servers)}; {fix}"
        )


def _refusal(device: DevicePlan) -> str:
    parts = sorted(device.parts, key=lambda part: -part.num_bytes)
    largest = max(device.trainer or device.server, key=lambda part: part.num_bytes)
    setting, fix = largest.setting, largest.fix
    if device.server and (room := room_for_server(device, total_bytes=device.total_bytes)) is not None:
        setting = device.server[1].setting
        fix = f"use {setting.partition('=')[0]}={room:.2f} or less"
    held = ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in parts[:4])
    return (
        f"{setting}: {device.name} has {_gib(device.total_bytes)} and would have to hold {_gib(device.needed_bytes)} "
        f"({held}, ...); {fix}; placement.check_memory=false starts all the same"
    )


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
