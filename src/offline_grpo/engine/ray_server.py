"""A server on some machine of a Ray cluster, which an actor there starts, watches and stops.

`begin` launches the server without waiting, `start` waits until it is ready; both may be called again. An actor that is
lost is replaced: while it waits for its place by `_has_place`, later by `stop`, which comes before every restart.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offline_grpo import progress
from offline_grpo.disk import OwnFolder
from offline_grpo.engine.command_line import is_loopback
from offline_grpo.engine.launcher import Launcher
from offline_grpo.engine.process import POLL_S, PROGRESS_INTERVAL_S, last_line
from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError, EngineDied, EngineError, GrpoError

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""An actor answers within milliseconds. A longer silence means that its machine is lost; Ray itself notices after about
30 s.
"""
STOP_S = 30.0
PREFIX = ".weights-"


class ServerActor:
    """What Ray runs on the server's machine: a `Server` that listens at the machine's address.

    Args:
        launcher, log_dir, number, args, env: see `Server`. Where machines do not share the run's folder, the log is in
        a folder of the
            same name on the server's own.
    """

    def __init__(
        self, launcher: Launcher, log_dir: Path, number: int, args: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        import ray

        self._log_number = 0
        address = ray.util.get_node_ip_address()
        own = replace(launcher, host=address) if is_loopback(launcher.host) else launcher  # type: ignore[type-var]  # all are dataclasses
        about: dict[str, Any] = {"launcher": own, "log_dir": log_dir, "number": number, "args": args, "env": env}
        self._server = Server(base_url=None, api_key=None, log_numbers=iter(lambda: self._log_number, None), **about)
        port = self._server.base_url.rpartition(":")[2]
        self._url = f"http://{f'[{address}]' if ':' in address else address}:{port}"

    def place(self) -> tuple[str, str]:
        """Where the server will answer, and the machine's name."""
        return self._url, platform.node()

    def begin(self, model: str, args: Mapping[str, Any], log_number: int) -> None:
        """See `Server.begin`. Raises ConfigError, naming the machine, if it lacks the server's package."""
        self._log_number = log_number
        assert self._server._launcher is not None
        try:
            self._server._launcher.check_installed()
        except ConfigError as error:
            raise ConfigError(f"{platform.node()}, a machine of the Ray cluster: {error}") from error
        self._server.begin(model, args=args)

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        """See `Server.start`; returns at once if the server is ready."""
        self._server.start(model, args=args)

    def is_ready(self) -> bool:
        """See `Server.is_ready`."""
        return self._server.is_ready

    def last_line(self) -> str:
        """The newest line of the log."""
        return "" if self._server._process is None else last_line(self._server._process.log_path)

    def check_alive(self) -> None:
        """See `Server.check_alive`."""
        self._server.check_alive()

    def check_healthy(self) -> None:
        """See `Server.check_healthy`."""
        self._server.check_healthy()

    def sees(self, path: Path) -> bool:
        """Whether the machine has this file."""
        return path.exists()

    def stop(self) -> None:
        """See `Server.stop`."""
        self._server.stop()


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
        self._machine = ""
        self._words: tuple[str, dict[str, Any]] = ("", {})
        self._log_number = 0
        self._begun: Any = None  # the actor's answer to `begin`, until `start` has waited for it
        self._employ()
        common: dict[str, Any] = {
            "api_key": launcher.api_key,
            "launcher": None,
            "log_dir": log_dir,
            "log_numbers": log_numbers,
        }
        super().__init__(base_url="http://a-machine-of-the-cluster", **common, key="placement.address")
        self.wait_for_place()

    @property
    def is_managed(self) -> bool:
        """See `Server.is_managed`."""
        return True

    @property
    def scratch(self) -> Path:
        """A folder for what the server reads from us. It is in the run's folder, which all machines have to see.

        Raises:
            ConfigError: the server's machine does not see it.
        """
        if self._shared is None:
            self._shared = OwnFolder(self.log_dir.absolute(), PREFIX)
        if not self._ask("sees", self._shared.path):
            raise ConfigError(
                f"hydra.run.dir={self.log_dir}: {self._machine} has to read weights there, and does not see this folder; put it on a file "
                "system that all machines share, or use weight_sync=nccl"
            )
        return self._shared.path

    def wait_for_place(self) -> None:
        """Wait until Ray has found room on a machine.

        Raises:
            EngineError: it has found none in `engine.start_timeout_s`.
        """
        began = told = time.monotonic()
        while not self._has_place():
            now = time.monotonic()
            if now - began > self._start_timeout_s:
                raise EngineError(
                    f"the Ray cluster had no room for a server for {self._start_timeout_s:g} s (engine.start_timeout_s)"
                )
            if now - told >= PROGRESS_INTERVAL_S:
                told = now
                log.info("waiting for room in the Ray cluster: %.0f s", now - began)
            time.sleep(POLL_S)

    def begin(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """See `Server.begin`. Does not wait for room in the cluster either."""
        words = model, dict(args or {})
        if self._begun is not None and words == self._words:
            return
        self._words, self._began_s = words, time.monotonic()
        self.num_starts += 1
        self._log_number = next(self._log_numbers)
        self._tell_to_begin()

    def start(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """See `Server.start`."""
        self.begin(model, args=args)
        assert self._began_s is not None
        with progress.phase("start server"):
            self.wait_for_place()
            self._answer(self._begun, STOP_S)
            told = time.monotonic()
            while not self._ask("is_ready"):
                if time.monotonic() - told >= PROGRESS_INTERVAL_S:
                    told = time.monotonic()
                    log.info(
                        "waiting for the server on %s: %.0f s; %s",
                        self._machine,
                        told - self._began_s,
                        self._ask("last_line"),
                    )
                time.sleep(POLL_S)
            self._ask("start", *self._words, timeout_s=STOP_S)
        log.info(
            "a server is ready on %s, at %s, after %.0f s",
            self._machine,
            self.base_url,
            time.monotonic() - self._began_s,
        )
        self._begun = self._began_s = None

    @property
    def is_ready(self) -> bool:
        """See `Server.is_ready`."""
        try:
            if not self._has_place():
                return False
            self._answer(self._begun, STOP_S)
            return self._ask("is_ready")
        except GrpoError:
            return True  # `start` says what is wrong

    @property
    def is_observed(self) -> bool:
        """See `Server.is_observed`."""
        return self._place is None

    def _look(self) -> None:
        """See `Server._look`. A machine that does not answer is one that has ended. Whoever waits does so here: the
        actor does one thing at a time."""
        self._ask("check_alive")

    def check_healthy(self) -> None:
        """See `Server.check_healthy`."""
        self._ask("check_healthy", timeout_s=STOP_S)

    def stop(self) -> None:
        """See `Server.stop`. The actor stays, for another start, unless it is lost."""
        try:
            if self._place is None:
                self._ask("stop", timeout_s=STOP_S)
        except EngineError:
            self._employ()
        if self._shared is not None:
            self._shared.remove()
            self._shared = None
        self._begun = self._began_s = None

    @property
    def _is_watched(self) -> bool:
        return True

    def _employ(self) -> None:
        """Have a new actor, wherever there will be room for it."""
        self._actor = self._hire()
        self._place = self._actor.place.remote()

    def _tell_to_begin(self) -> None:
        self._begun = self._actor.begin.remote(*self._words, self._log_number)

    def _has_place(self) -> bool:
        """Whether the actor runs. One that Ray has put onto a machine that it did not know to be lost is replaced."""
        import ray

        if self._place is None:
            return True
        if not ray.wait([self._place], timeout=0)[0]:
            return False
        try:
            url, self._machine = self._answer(self._place, ANSWER_S)
        except EngineDied:
            self._employ()
            if self._begun is not None:
                self._tell_to_begin()
            return False
        self._place = None
        if url != self.base_url:
            self.move_to(url)
        return True

    def _ask(self, method: str, *words: Any, timeout_s: float = ANSWER_S) -> Any:
        return self._answer(getattr(self._actor, method).remote(*words), timeout_s)

    def _answer(self, reference: Any, timeout_s: float) -> Any:
        """What an actor answers, or raises.

        Raises:
            EngineDied: it is lost, or does not answer in time.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            raise error.cause from None
        except (RayActorError, GetTimeoutError) as error:
            why = f"does not answer within {timeout_s:g} s" if isinstance(error, GetTimeoutError) else "has gone"
            raise EngineDied(f"the server's machine {self._machine or 'in the Ray cluster'} {why}.") from error
