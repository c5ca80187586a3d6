"""A Ray cluster: connecting to it, reserving room for actors, placing and asking them; and servers there, each started
and watched by an actor on its machine.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from offline_grpo.engine.http import RELEASE_S, choose_port, is_loopback, reachable
from offline_grpo.engine.spawn import Lost, Scratch
from offline_grpo.errors import ConfigError, EngineDied, EngineError, reason_of, require
from offline_grpo.installed import install_command

CONNECT_S = 4.0  # timeout of a connection to the cluster's address
SETTLE_S = 10.0  # until Ray must have granted a reservation that fits by its own numbers
CALLS = 8  # of an actor that run at the same time: it may be asked while it starts something
ANSWER_S = 10.0
"""An actor answers within milliseconds. A longer silence means that its machine is lost; Ray notices after about 30 s.
"""
STOP_S = 30.0


def connect(address: str, settings: Mapping[str, Any], *, group: str = "placement") -> bool:
    """Connect this process to a cluster. Returns whether it was not connected before. Raises ConfigError where Ray is
    not installed, or no cluster answers.

    Args:
        address: auto for the cluster that this machine is part of, local for a new one on this machine alone, or
            HOST:PORT.
        settings: further arguments of `ray.init`.
        group: of these settings, for messages.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call after the end would start a cluster of its own
    try:
        import ray
    except ImportError as error:
        fix = f"Ray is not installed ({error}); install it by `{install_command('ray')}`"
        raise ConfigError(f"{group}.address={address}: {fix}") from error
    if ray.is_initialized():
        return False

    # Ray itself would wait for minutes where nothing listens, so the address is tried first.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        if address != "local":
            found = address
            if address == "auto":
                found = os.environ.get("RAY_ADDRESS", "")
                current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # by `ray start`
                if not found and current.exists():
                    found = current.read_text().strip()
            host, _, port = found.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, **{**quiet, **settings})
    except (ConnectionError, RuntimeError, TypeError, ValueError, OSError) as error:
        fix = f"start one with `ray start --head` (docs/scaling.md), or use {group}.address=local"
        given = f", ray_init={dict(settings)}" if settings else ""
        raise ConfigError(f"{group}.address={address}{given}: no Ray cluster ({reason_of(error)}); {fix}") from error

    # Ray has replaced the handler by one that ends the process at once.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
    return True


class Room:
    """A reservation for `count` actors of a kind in a cluster, until `close` or this process's end. Raises ConfigError
    like `connect`, and where the cluster is too small, or others use it.

    Args:
        key: the setting that says `count`.
        gpus: that each actor gets where the cluster has GPUs, beside a CPU core.
        strategy: PACK or SPREAD: on as few machines as possible, or on different ones where there is room.
    """

    def __init__(
        self, address: str, settings: Mapping[str, Any], key: str, count: int, *, gpus: int, strategy: str
    ) -> None:
        self._is_ours, self._group = connect(address, settings), None
        import ray
        from ray.util.placement_group import placement_group

        with ExitStack() as on_error:
            on_error.callback(self.close)

            # What each actor needs, and whether the machines have it.
            nodes = [node for node in ray.nodes() if node["Alive"]]
            has_gpus = gpus > 0 and any(node["Resources"].get("GPU") for node in nodes)
            self._needs = {"CPU": 1.0, "GPU": float(gpus)} if has_gpus else {"CPU": 1.0}
            what = f"{gpus} GPU{'s' if gpus > 1 else ''} and a CPU core" if has_gpus else "a CPU core"
            self.machines = ", ".join(f"{node['NodeManagerHostname']}: {shown(node['Resources'])}" for node in nodes)
            room = int(sum(room_for(node["Resources"], self._needs) for node in nodes))
            fix = f"each needs {what} on one machine, and the Ray cluster at placement.address={address}"
            require(count <= room, key, count, f"{fix} has room for {room} ({self.machines})")

            # Others may have taken what would be there.
            self._group = placement_group([self._needs] * count, strategy=strategy)
            if not self._group.wait(SETTLE_S):
                left = shown(ray.available_resources())
                raise ConfigError(f"{key}={count}: {fix} has only {left} left; others use it. Try again later")
            on_error.pop_all()

    def hire(self, index: int, kind: type) -> Any:
        """The handle of an actor of class `kind` in place `index`; Ray starts it when the place is there."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._group is not None
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        size = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0.0), "max_concurrency": CALLS}
        return ray.remote(kind).options(**size, scheduling_strategy=place).remote()

    def close(self) -> None:
        """End all actors in it, release the reservation, and leave a cluster that nobody else here uses."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()


class ServerActor:
    """What Ray runs on a server's machine: starts it there, and watches it. The server ends with the actor."""

    def start(self, launcher: Any, model: str, args: Mapping[str, Any], port: Any, log_path: Path) -> tuple[str, str]:
        """Returns the server's URL, at this machine's address, and the machine's name. Where machines do not share the
        run's folder, the log is in a folder of the same name on this one.
        """
        import ray

        try:
            launcher.check_installed()
        except ConfigError as error:
            raise ConfigError(f"{platform.node()}, a machine of the Ray cluster: {error}") from error

        # It listens where the run's machine reaches it.
        address = ray.util.get_node_ip_address()
        launcher = replace(launcher, host=address) if is_loopback(launcher.host) else launcher
        port = choose_port(launcher.host, port, key="engine.port", wait_s=RELEASE_S)
        self._scratch = Scratch()  # whose lock this process holds
        self._child = launcher.spawn(model, args, port, None, log_path, self._scratch.path)
        return f"http://{reachable(address)}:{port}", platform.node()

    def how_it_ended(self) -> str | None:
        return self._child.how_it_ended()

    def stop(self) -> str | None:
        """Stop the server. Returns how it ended."""
        self._child.stop()
        return self._child.how_it_ended()

    def sees(self, path: Path) -> bool:
        """Whether the machine has this file."""
        return path.exists()


class RemoteChild:
    """As `Child`, a server that an actor starts wherever the cluster has room for it, at once or later.

    Args:
        number: its place in the room.
        words: of `ServerActor.start`.
        on_place: called with its URL once it has been started somewhere.
    """

    pid = None

    def __init__(self, room: Room, number: int, words: Sequence[Any], on_place: Callable[[str], None]) -> None:
        self.machine = "in the Ray cluster"
        self._actor = room.hire(number, ServerActor)
        self._answer = self._actor.start.remote(*words)
        self._on_place, self._is_placed = on_place, False
        self._end = "was stopped; the Ray cluster had no room for it."

    @property
    def is_placed(self) -> bool:
        """Whether it has been started somewhere. Raises ConfigError if it cannot be."""
        import ray

        if not self._is_placed and ray.wait([self._answer], timeout=0)[0]:
            url, self.machine = self._result(self._answer)
            self._on_place(url)
            self._is_placed = True
        return self._is_placed

    def how_it_ended(self) -> str | None:
        """Raises Lost, or EngineDied if the actor does not answer."""
        if self._actor is None:
            return self._end
        return self._result(self._actor.how_it_ended.remote()) if self.is_placed else None

    def sees(self, path: Path) -> bool:
        """Whether its machine has this file."""
        assert self._actor is not None
        return self._result(self._actor.sees.remote(path))

    def stop(self) -> None:
        """End it and its actor; what a lost one has started ends with its machine."""
        import ray

        if self._actor is not None:
            if self._is_placed:
                with suppress(EngineError):
                    self._end = self._result(self._actor.stop.remote(), timeout_s=STOP_S)
            ray.kill(self._actor)
            self._actor = None

    def _result(self, reference: Any, *, timeout_s: float = ANSWER_S) -> Any:
        """The result of the actor's method, or the error that it raised. Raises Lost, or EngineDied, see above."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        name = f"the machine of a server, {self.machine},"
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
