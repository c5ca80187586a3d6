"""The Ray cluster that `placement=ray` puts servers on."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from offline_grpo.engine.ray_server import RayServer, ServerActor
from offline_grpo.errors import ConfigError, reason_of, require

log = logging.getLogger(__name__)

CONNECT_S = 4.0
"""Timeout of a connection to the cluster's address."""
SETTLE_S = 10.0
"""Until Ray must have granted a reservation that fits by its own numbers."""


class RayCluster:
    """A cluster in which room for servers is reserved. The room is given back by `close`, and when this process ends,
    however it does.

    Args:
        address, settings: see `connect`.
        num_servers: each gets `gpus_per_server` GPUs where the cluster has GPUs, else one CPU core; on different
            machines where there is room.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or it is too small.
    """

    def __init__(self, address: str, settings: Mapping[str, Any], *, num_servers: int, gpus_per_server: int) -> None:
        self._is_ours = connect(address, settings)
        try:
            self._room = Room(address, "placement.num_engines", num_servers, gpus=gpus_per_server, strategy="SPREAD")
        except BaseException:
            self._leave()
            raise
        log.info("the Ray cluster at %s: %s", address, self._room.machines)
        self._next = iter(range(num_servers))

    def server(self, **about: Any) -> RayServer:
        """The next server, with these arguments of `RayServer`."""
        return RayServer(partial(self._room.hire, next(self._next), ServerActor), **about)

    def close(self) -> None:
        """End all that runs in the room, and give it back."""
        self._room.close()
        self._leave()

    def _leave(self) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()


class Room:
    """Room in the cluster that this process is connected to, for so many actors of one kind. `close` ends them, and
    gives it back.

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
        room = int(sum(room_for(node["Resources"], self._needs) for node in nodes))
        self.machines = ", ".join(f"{node['NodeManagerHostname']}: {shown(node['Resources'])}" for node in nodes)
        fix = f"each needs {what} on one machine, and the Ray cluster at placement.address={address} has room for {room} ({self.machines})"
        require(count <= room, key, count, fix)
        self._group = placement_group([self._needs] * count, strategy=strategy)
        try:
            if not self._group.wait(SETTLE_S):
                remains = f"has only {shown(ray.available_resources())} left; others use it. Try again later"
                fix = f"each needs {what} on one machine, and the Ray cluster at placement.address={address} {remains}"
                raise ConfigError(f"{key}={count}: {fix}")
        except BaseException:
            self.close()
            raise

    def hire(self, index: int, kind: type, *arguments: Any) -> Any:
        """The handle of an actor of this class in the place of this number; Ray starts it when the place is there."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {
            "num_cpus": self._needs["CPU"],
            "num_gpus": self._needs.get("GPU", 0.0),
            "scheduling_strategy": place,
        }
        return ray.remote(kind).options(**options).remote(*arguments)

    def close(self) -> None:
        """End all actors in it, and give it back."""
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):  # the cluster may be gone
            remove_placement_group(self._group)


def connect(address: str, settings: Mapping[str, Any], *, group: str = "placement") -> bool:
    """Connect this process to a cluster; whether it was not connected before.

    Args:
        address: `placement.address`: auto for the cluster that this machine is part of, local for a new one on this
            machine alone, or HOST:PORT.
        settings: further arguments of `ray.init`.
        group: of these settings, for messages.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call that comes after the end would start a cluster of its own
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"{group}.address={address}: Ray is not installed ({error}); start with `uv run --extra ray ...`"
        ) from error
    if ray.is_initialized():
        return False
    start_one = f"start one with `ray start --head` (docs/scaling.md), or use {group}.address=local"
    _check_answers(address, group, start_one)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        ray.init(address=address, **{**quiet, **settings})
    except (ConnectionError, RuntimeError, TypeError, ValueError, OSError) as error:
        if "keyword argument" in str(error):
            raise ConfigError(f"{group}.ray_init={dict(settings)}: ray.init does not take this ({error})") from error
        raise ConfigError(
            f"{group}.address={address}: no Ray cluster that can be used ({reason_of(error)}); {start_one}"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in its place, which ends the process at once
    return True


def _check_answers(address: str, group: str, start_one: str) -> None:
    """Ray itself would wait for minutes where nobody answers."""
    if address == "local":
        return
    found = address if address != "auto" else os.environ.get("RAY_ADDRESS") or _current_cluster()
    host, _, port = found.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        where = f"{group}.address={address}" + (f" ({found or 'no cluster'})" if address == "auto" else "")
        raise ConfigError(f"{where}: nobody answers there ({reason_of(error)}); {start_one}") from error


def _current_cluster() -> str:
    """HOST:PORT of the cluster that `ray start` has made this machine a part of; it may have ended since. Empty where
    there was none.
    """
    with suppress(OSError):
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
    return ""


def room_for(resources: Mapping[str, float], needs: Mapping[str, float]) -> float:
    """How many times one machine has what is needed of its CPU and GPU."""
    return min((resources.get(name, 0) // amount for name, amount in needs.items() if amount > 0), default=math.inf)


def shown(resources: Mapping[str, float]) -> str:
    """`2 GPUs and 8 CPUs`."""
    counts = ((name, resources.get(name, 0.0)) for name in ("GPU", "CPU"))
    return " and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in counts)
