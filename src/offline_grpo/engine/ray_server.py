"""Servers on the machines of a Ray cluster: for each start an actor there, which starts, watches and stops it."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from offline_grpo import progress
from offline_grpo.disk import OwnFolder
from offline_grpo.engine.launcher import Launcher
from offline_grpo.engine.ports import is_loopback, reachable
from offline_grpo.engine.process import wait_until
from offline_grpo.engine.ray_actor import Lost, Room, connect, result_of
from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""An actor answers within milliseconds. A longer silence means that its machine is lost; Ray notices after about 30 s.
"""
STOP_S = 30.0
PREFIX = ".weights-"


class RayCluster:
    """A cluster in which room for servers is reserved until `close`, or until this process ends, however it does.

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
        """End all servers, and release the reservation."""
        self._room.close()
        self._leave()

    def _leave(self) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()


class ServerActor:
    """What Ray runs on the server's machine: a `Server` that listens at the machine's address, for one start."""

    def start(
        self, model: str, launcher: Launcher, log_dir: Path, start_args: Mapping[str, Any], about: Mapping[str, Any]
    ) -> tuple[str, str]:
        """See `Server.start`. Returns the URL at which other machines find the server, and the name of this one.

        Args:
            log_dir: where machines do not share the run's folder, a folder of the same name on the server's own.
            about: `number`, `log_numbers`, `args` and `env`, see `Server`.
        """
        import ray

        try:
            launcher.check_installed()
        except ConfigError as error:
            raise ConfigError(f"{platform.node()}, a machine of the Ray cluster: {error}") from error
        address = ray.util.get_node_ip_address()
        launcher = replace(launcher, host=address) if is_loopback(launcher.host) else launcher
        self._server = Server(launcher=launcher, log_dir=log_dir, **about)
        self._server.start(model, args=start_args)
        port = self._server.base_url.rpartition(":")[2]
        return f"http://{reachable(address)}:{port}", platform.node()

    def call(self, method: str, **options: Any) -> None:
        """Call this method of `Server`."""
        getattr(self._server, method)(**options)

    def sees(self, path: Path) -> bool:
        """Whether the machine has this file."""
        return path.exists()


class RayServer(Server):
    """A managed server wherever the cluster has room for it. When it, or its machine, is lost, it is started again
    where there is room.

    Args:
        hire: creates a `ServerActor` and returns its handle at once; Ray starts it when there is room.
        launcher, log_dir, number, log_numbers, args, env: see `Server`.
    """

    def __init__(
        self,
        hire: Callable[[], Any],
        *,
        launcher: Launcher,
        log_dir: Path,
        number: int,
        log_numbers: Iterator[int],
        args: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> None:
        super().__init__(
            base_url="http://a-machine-of-the-cluster",
            api_key=launcher.api_key,
            log_dir=log_dir,
            log_numbers=log_numbers,
            key="placement.address",
        )
        self._hire = hire
        self._there: tuple[Launcher, Path] = launcher, log_dir.absolute()
        self._about: dict[str, Any] = {"number": number, "args": dict(args), "env": dict(env)}
        self._actor: Any = None
        self._answer: Any = None  # the actor's, to `start`
        self._machine = "in the Ray cluster"
        self._shared: OwnFolder | None = None

    @property
    def is_managed(self) -> bool:
        return True

    @property
    def scratch(self) -> Path:
        """See `Server.scratch`. It is in the run's folder, which all machines have to see.

        Raises:
            ConfigError: the server's machine does not see it.
        """
        if self._shared is None:
            self._shared = OwnFolder(self.log_dir.absolute(), PREFIX)
        if not result_of(self._actor.sees.remote(self._shared.path), self._name, timeout_s=ANSWER_S):
            raise ConfigError(
                f"hydra.run.dir={self.log_dir}: {self._machine} has to read weights there, and does not see this "
                "folder; put it on a file system that all machines share, or use weight_sync=nccl"
            )
        return self._shared.path

    def begin(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """See `Server.begin`. Does not wait for room in the cluster either."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._about["log_numbers"] = iter([next(self._log_numbers)])
            self._employ(model, dict(args or {}))

    def start(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """See `Server.start`. An actor whose machine is lost meanwhile is replaced."""
        self.begin(model, args=args)
        assert self._began_s is not None

        def is_ready() -> bool:
            import ray

            if not ray.wait([self._answer], timeout=0)[0]:
                return False
            try:
                url, self._machine = result_of(self._answer, self._name, timeout_s=ANSWER_S)
            except Lost:
                self._employ(model, dict(args or {}))
                return False
            self.move_to(url)
            return True

        timeout_s = self._there[0].start_timeout_s + STOP_S  # the actor itself raises earlier, for its server
        with progress.phase("start server"):
            if not wait_until(is_ready, what="a server in the Ray cluster", since_s=self._began_s, timeout_s=timeout_s):
                raise EngineError(f"the Ray cluster had no room for a server for {timeout_s:.0f} s")
        seconds, self._began_s = time.monotonic() - self._began_s, None
        log.info("a server is ready on %s, at %s, after %.0f s", self._machine, self.base_url, seconds)

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        if self._actor is not None and self._began_s is None:
            self._call("check_alive", grace_s=grace_s, timeout_s=ANSWER_S + grace_s)

    def check_healthy(self) -> None:
        self._call("check_healthy", timeout_s=STOP_S)

    def give_up(self, why: str) -> None:
        self._call("give_up", why=why, timeout_s=STOP_S)

    def stop(self) -> None:
        """See `Server.stop`. Ends the actor; what a lost one has started ends with its machine."""
        if self._actor is not None:
            import ray

            with suppress(EngineError):
                if self._began_s is None:
                    self._call("stop", timeout_s=STOP_S)
            ray.kill(self._actor)
            self._actor = None
        if self._shared is not None:
            self._shared.remove()
            self._shared = None
        self._began_s = None

    @property
    def _name(self) -> str:
        return f"the machine of a server, {self._machine},"

    def _employ(self, model: str, start_args: Mapping[str, Any]) -> None:
        """Have a new actor, wherever there will be room for it."""
        self._actor = self._hire()
        self._answer = self._actor.start.remote(model, *self._there, start_args, self._about)

    def _call(self, method: str, *, timeout_s: float, **options: Any) -> None:
        result_of(self._actor.call.remote(method, **options), self._name, timeout_s=timeout_s)
