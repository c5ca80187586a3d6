"""Servers on the machines of a Ray cluster: an actor there starts, watches and stops each.

`begin` launches the server without waiting, `start` waits until it is ready; both may be called again. An actor that is
lost is replaced: while it waits for its place by `_has_place`, later by `stop`, which comes before every restart.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from offline_grpo import progress
from offline_grpo.disk import OwnFolder
from offline_grpo.engine.launcher import Launcher
from offline_grpo.engine.ports import is_loopback, reachable
from offline_grpo.engine.process import POLL_S, PROGRESS_INTERVAL_S
from offline_grpo.engine.ray_actor import Room, connect, result_of
from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError, EngineDied, EngineError

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
    """What Ray runs on the server's machine: a `Server` that listens at the machine's address.

    Args:
        launcher, log_dir, number, args, env: see `Server`. Where machines do not share the run's folder, the log is in
            a folder of the same name on the server's own.
    """

    def __init__(
        self, launcher: Launcher, log_dir: Path, number: int, args: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        import ray

        self._log_number = 0
        self._address = ray.util.get_node_ip_address()
        self._launcher = replace(launcher, host=self._address) if is_loopback(launcher.host) else launcher
        common: dict[str, Any] = {"launcher": self._launcher, "log_dir": log_dir, "number": number}
        log_numbers = iter(lambda: self._log_number, None)
        self._server = Server(**common, args=args, env=env, log_numbers=log_numbers)

    def place(self) -> tuple[str, str]:
        """The URL at which the server will answer, and the machine's name."""
        port = self._server.base_url.rpartition(":")[2]
        return f"http://{reachable(self._address)}:{port}", platform.node()

    def begin(self, model: str, args: Mapping[str, Any], log_number: int) -> None:
        """See `Server.begin`. Raises ConfigError, naming the machine, if it lacks the server's package."""
        self._log_number = log_number
        try:
            self._launcher.check_installed()
        except ConfigError as error:
            raise ConfigError(f"{platform.node()}, a machine of the Ray cluster: {error}") from error
        self._server.begin(model, args=args)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What this method of `Server` returns."""
        return getattr(self._server, method)(*arguments, **options)

    def is_ready(self) -> bool:
        """See `Server.is_ready`."""
        return self._server.is_ready

    def sees(self, path: Path) -> bool:
        """Whether the machine has this file."""
        return path.exists()


class RayServer(Server):
    """A managed server wherever the cluster has room for it. When it, or its machine, is lost, it is started again
    where there is room.

    Args:
        hire: creates a `ServerActor` with these arguments and returns its handle at once; Ray starts it when there
            is room.
        launcher, log_dir, number, log_numbers, args, env: see `Server`.
    """

    def __init__(
        self,
        hire: Callable[..., Any],
        *,
        launcher: Launcher,
        log_dir: Path,
        number: int,
        log_numbers: Iterator[int],
        args: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> None:
        self._hire: Callable[[], Any] = lambda: hire(launcher, log_dir.absolute(), number, dict(args), dict(env))
        self._start_timeout_s = launcher.start_timeout_s
        self._shared: OwnFolder | None = None
        self._machine = "in the Ray cluster"
        self._log_number = 0
        self._words: tuple[str, dict[str, Any]] = ("", {})
        self._begun: Any = None  # the actor's answer to `begin`, until `start` has waited for it
        self._employ()
        common: dict[str, Any] = {"api_key": launcher.api_key, "log_dir": log_dir, "log_numbers": log_numbers}
        super().__init__(base_url="http://a-machine-of-the-cluster", **common, key="placement.address")
        self._wait(self._has_place, "room in the Ray cluster", time.monotonic())

    @property
    def is_managed(self) -> bool:
        """See `Server.is_managed`."""
        return True

    @property
    def is_watched(self) -> bool:
        """See `Server.is_watched`."""
        return self._place is None

    @property
    def scratch(self) -> Path:
        """See `Server.scratch`. It is in the run's folder, which all machines have to see.

        Raises:
            ConfigError: the server's machine does not see it.
        """
        if self._shared is None:
            self._shared = OwnFolder(self.log_dir.absolute(), PREFIX)
        if not self._ask("sees", self._shared.path):
            raise ConfigError(
                f"hydra.run.dir={self.log_dir}: {self._machine} has to read weights there, and does not see this "
                "folder; put it on a file system that all machines share, or use weight_sync=nccl"
            )
        return self._shared.path

    def begin(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """See `Server.begin`. Does not wait for room in the cluster either."""
        words = model, dict(args or {})
        if self._begun is not None and words == self._words:
            return
        self._words, self._began_s = words, time.monotonic()
        self._log_number = next(self._log_numbers)
        self._begun = self._actor.begin.remote(*words, self._log_number)

    def start(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """See `Server.start`."""
        self.begin(model, args=args)
        assert self._began_s is not None
        with progress.phase("start server"):
            self._wait(self._has_place, "room in the Ray cluster", self._began_s)
            self._result(self._begun, STOP_S)
            self._wait(lambda: self._ask("is_ready"), f"the server on {self._machine}", self._began_s)
            self._ask("call", "start", self._words[0], args=self._words[1], timeout_s=STOP_S)
        seconds = time.monotonic() - self._began_s
        log.info("a server is ready on %s, at %s, after %.0f s", self._machine, self.base_url, seconds)
        self._begun = self._began_s = None

    def check_healthy(self) -> None:
        """See `Server.check_healthy`."""
        self._ask("call", "check_healthy", timeout_s=STOP_S)

    def stop(self) -> None:
        """See `Server.stop`. The actor stays, for another start, unless it is lost."""
        try:
            if self._place is None:
                self._ask("call", "stop", timeout_s=STOP_S)
        except EngineError:
            self._employ()
        if self._shared is not None:
            self._shared.remove()
            self._shared = None
        self._begun = self._began_s = None

    def _look(self) -> None:
        self._ask("call", "check_alive")

    def _wait(self, is_so: Callable[[], bool], what: str, since_s: float) -> None:
        told = time.monotonic()
        while not is_so():
            now = time.monotonic()
            if now - since_s > self._start_timeout_s + STOP_S:  # the actor itself raises earlier, for its server
                raise EngineError(f"waited for {what} for {now - since_s:.0f} s (engine.start_timeout_s)")
            if now - told >= PROGRESS_INTERVAL_S:
                told = now
                log.info("waiting for %s: %.0f s", what, now - since_s)
            time.sleep(POLL_S)

    def _employ(self) -> None:
        """Have a new actor, wherever there will be room for it."""
        self._actor = self._hire()
        self._place = self._actor.place.remote()

    def _has_place(self) -> bool:
        """Whether the actor runs. One that Ray has put onto a machine that it did not know to be lost is replaced."""
        import ray

        if self._place is None:
            return True
        if not ray.wait([self._place], timeout=0)[0]:
            return False
        try:
            url, self._machine = self._result(self._place, ANSWER_S)
        except EngineDied:
            self._employ()
            if self._begun is not None:
                self._begun = self._actor.begin.remote(*self._words, self._log_number)
            return False
        self._place = None
        if url != self.base_url:
            self.move_to(url)
        return True

    def _ask(self, method: str, *words: Any, timeout_s: float = ANSWER_S, **options: Any) -> Any:
        return self._result(getattr(self._actor, method).remote(*words, **options), timeout_s)

    def _result(self, reference: Any, timeout_s: float) -> Any:
        return result_of(reference, f"the server's machine {self._machine}", timeout_s=timeout_s)
