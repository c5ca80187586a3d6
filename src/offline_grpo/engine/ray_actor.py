"""Actors in a Ray cluster: connecting to it, reserving room for them, placing them, and asking them."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError, EngineDied, reason_of, require

CONNECT_S = 4.0
"""Timeout of a connection to the cluster's address."""
SETTLE_S = 10.0
"""Until Ray must have granted a reservation that fits by its own numbers."""
CALLS = 8
"""Of an actor that run at the same time: it may be asked while it starts something."""


class Lost(EngineDied):
    """An actor has gone, by itself or with its machine."""


def connect(address: str, settings: Mapping[str, Any], *, group: str = "placement") -> bool:
    """Connect this process to a cluster. Returns whether it was not connected before.

    Args:
        address: `placement.address`: auto for the cluster that this machine is part of, local for a new one on this
            machine alone, or HOST:PORT.
        settings: further arguments of `ray.init`.
        group: of these settings, for messages.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call after the end would start a cluster of its own
    try:
        import ray
    except ImportError as error:
        fix = f"Ray is not installed ({error}); start with `uv run --extra ray ...`"
        raise ConfigError(f"{group}.address={address}: {fix}") from error
    if ray.is_initialized():
        return False
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        if address != "local":
            _check_answers(address)
        ray.init(address=address, **{**quiet, **settings})
    except (ConnectionError, RuntimeError, TypeError, ValueError, OSError) as error:
        fix = f"start one with `ray start --head` (docs/scaling.md), or use {group}.address=local"
        given = f", ray_init={dict(settings)}" if settings else ""
        raise ConfigError(f"{group}.address={address}{given}: no Ray cluster ({reason_of(error)}); {fix}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has replaced it by one that ends the process at once
    return True


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError where nothing listens: Ray itself would wait for minutes."""
    found = address
    if address == "auto":
        found = os.environ.get("RAY_ADDRESS", "")
        current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # written by `ray start`
        if not found and current.exists():
            found = current.read_text().strip()
    host, _, port = found.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


class Room:
    """A reservation for `count` actors of one kind in the cluster that this process is connected to. `close` ends them.

    Args:
        address: see `connect`; for messages.
        key: the setting that says `count`.
        gpus: that each actor gets where the cluster has GPUs, beside a CPU core.
        strategy: PACK or SPREAD: on as few machines as possible, or on different ones where there is room.

    Raises:
        ConfigError: the cluster is too small, or others use it.
    """

    def __init__(self, address: str, key: str, count: int, *, gpus: int, strategy: str) -> None:
        import ray
        from ray.util.placement_group import placement_group

        nodes = [node for node in ray.nodes() if node["Alive"]]
        has_gpus = gpus > 0 and any(node["Resources"].get("GPU") for node in nodes)
        self._needs = {"CPU": 1.0, "GPU": float(gpus)} if has_gpus else {"CPU": 1.0}
        what = f"{gpus} GPU{'s' if gpus > 1 else ''} and a CPU core" if has_gpus else "a CPU core"
        self.machines = ", ".join(f"{node['NodeManagerHostname']}: {shown(node['Resources'])}" for node in nodes)
        room = int(sum(room_for(node["Resources"], self._needs) for node in nodes))
        fix = f"each needs {what} on one machine, and the Ray cluster at placement.address={address}"
        require(count <= room, key, count, f"{fix} has room for {room} ({self.machines})")
        self._group = placement_group([self._needs] * count, strategy=strategy)
        if not self._group.wait(SETTLE_S):
            self.close()
            left = shown(ray.available_resources())
            raise ConfigError(f"{key}={count}: {fix} has only {left} left; others use it. Try again later")

    def hire(self, index: int, kind: type) -> Any:
        """The handle of an actor of class `kind` in place `index`; Ray starts it when the place is there."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        size = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0.0), "max_concurrency": CALLS}
        return ray.remote(kind).options(**size, scheduling_strategy=place).remote()

    def close(self) -> None:
        """End all actors in it, and release the reservation."""
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):  # the cluster may be gone
            remove_placement_group(self._group)


def result_of(reference: Any, name: str, *, timeout_s: float) -> Any:
    """The result of an actor's method, or the error that it raised.

    Raises:
        Lost: the actor on the machine `name` is.
        EngineDied: it does not answer in time.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise Lost(f"{name} {fate(error)}.") from error
    except GetTimeoutError as error:
        raise EngineDied(f"{name} does not answer within {timeout_s:g} s.") from error


def fate(error: Exception) -> str:
    """Of the machine of an actor that is lost, as Ray knows it."""
    is_alive = "worker process has died" in str(error)  # else it is lost, or does not answer
    return "has lost the process that Ray started there" if is_alive else "has gone"


def room_for(resources: Mapping[str, float], needs: Mapping[str, float]) -> float:
    """How many times `needs` fits into the CPUs and GPUs of one machine."""
    return min((resources.get(name, 0) // amount for name, amount in needs.items() if amount > 0), default=math.inf)


def shown(resources: Mapping[str, float]) -> str:
    """`2 GPUs and 8 CPUs`."""
    counts = ((name, resources.get(name, 0.0)) for name in ("GPU", "CPU"))
    return " and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in counts)
