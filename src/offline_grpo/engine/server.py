"""The inference server of a run: one that the run starts, watches and stops itself, or one that it found at a URL."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from offline_grpo.engine.background import in_background
from offline_grpo.engine.command_line import shown
from offline_grpo.engine.http import ServerApi
from offline_grpo.engine.ports import choose_port
from offline_grpo.engine.process import ServerProcess
from offline_grpo.engine.scratch import Scratch
from offline_grpo.errors import EngineDied, EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 5.0
"""How long after a failed request a server of our own that is ending may take to end."""
HEALTH_INTERVAL_S = 2.0
"""How often a server is asked for its health while a request to it is open."""


class Launcher(Protocol):
    """How a kind of server is started: the component of the `engine` group."""

    name: str
    host: str
    port: int | None
    api_key: str | None
    start_timeout_s: float

    def command(self, model: str, port: int, options: Mapping[str, Any]) -> list[str]:
        """The command line that serves `model`, with a strategy's `options` on top of the configured ones."""
        ...

    def environment(self, variables: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        """The environment of the command, with a strategy's `variables` and the GPUs that it may see (None: those that we see)."""
        ...


class Server:
    """Where completions come from over HTTP.

    Args:
        base_url: of a server that is already there; None for one of our own.
        launcher: starts one of our own.
        gpus: what our own may see.
        options, variables: what the weight-sync strategy adds to its command line and environment.
        log_dir: its output goes to `server_0.log`, that of the next start to `server_1.log`, and so on.
        key: the setting that `base_url` comes from, for messages.
    """

    def __init__(
        self,
        *,
        base_url: str | None,
        api_key: str | None,
        launcher: Launcher | None,
        log_dir: Path,
        gpus: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        key: str = "generation.base_url",
    ) -> None:
        assert (base_url is None) != (launcher is None), "a server is either found or started"
        self._launcher = launcher
        self.key = key
        self.log_dir = log_dir
        self._gpus = gpus
        self._options = dict(options or {})
        self._variables = dict(variables or {})
        self._process: ServerProcess | None = None
        self._watched_pid: int | None = None
        self._scratch: Scratch | None = None
        self.num_starts = 0
        self.api_key = api_key if launcher is None else launcher.api_key
        if launcher is not None:
            self._port = choose_port(launcher.host, launcher.port, key="engine.port")
            base_url = f"http://{reachable(launcher.host)}:{self._port}"
        assert base_url is not None
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.api = ServerApi(self.base_url, self.api_key)

    @property
    def is_managed(self) -> bool:
        """Whether the run started it, and so may start it again."""
        return self._launcher is not None

    @property
    def version_key(self) -> str:
        """The setting that decides which version answers."""
        return "engine.python" if self.is_managed else self.key

    @property
    def model_name(self) -> str:
        """What requests call the base weights."""
        if self._name is None:
            self._name = str(self.api.get("/v1/models")["data"][0]["id"])
        return self._name

    _name: str | None = None

    @property
    def scratch(self) -> Path:
        """A folder in shared memory for what the server reads from us.

        Whatever ends a server of our own removes it; beside a server that was found, it is our `stop`, or else the next run.
        """
        if self._scratch is None:
            self._scratch = Scratch()
        return self._scratch.path

    def start(self, model: str, *, options: Mapping[str, Any] | None = None) -> None:
        """Start our own server on `model` and wait until it is healthy; of a server that was found, only see that it is.

        Args:
            options: added to the command line for this start.

        Raises:
            EngineError: it cannot be started, ended while it started, was not ready in time, or is not there.
            ConfigError: the port is taken.
        """
        if self._launcher is None:
            if not self.api.answers("/health"):
                raise EngineError(f"{self.key}={self.base_url}: no healthy server answers at {self.base_url}/health")
            return
        started = time.monotonic()
        choose_port(self._launcher.host, self._port, key="engine.port")
        command = self._launcher.command(model, self._port, {**self._options, **(options or {})})
        log_path = self.log_dir / f"server_{self.num_starts}.log"
        log.info("starting %s: %s", self._launcher.name, shown(command))
        self.num_starts += 1
        self._process = ServerProcess(
            command, env=self._launcher.environment(self._variables, self._gpus), log_path=log_path, remove=self.scratch
        )
        self._process.wait_until(
            lambda: self.api.answers("/health"), timeout_s=self._launcher.start_timeout_s, what=f"{self._launcher.name} at {self.base_url}"
        )
        log.info("%s is ready at %s after %.0f s; its log: %s", self._launcher.name, self.base_url, time.monotonic() - started, log_path)

    def restart(self, model: str, *, options: Mapping[str, Any] | None = None) -> None:
        """Stop our own server and start it on `model`. See `start`."""
        self.stop()
        self.start(model, options=options)

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        """Raise EngineDied if our own server has ended, or ends within `grace_s`; nothing is known of one that was found."""
        deadline = time.monotonic() + grace_s
        while self._process is not None or self._watched_pid is not None:
            if self._process is not None:
                self._process.check_alive()
            elif self._watched_pid is not None and _has_ended(self._watched_pid):
                raise EngineDied(f"the server at {self.base_url}, which another process of this run started, has ended.")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def watch(self, pid: int | None) -> None:
        """Count this server as our own although another process of the run started it and stops it; `pid` is that server's."""
        self._watched_pid = pid

    def watched(self, call: Callable[[], T]) -> T:
        """The result of a request, or EngineDied as soon as our own server has ended or no longer says that it is healthy. A request that
        fails may be the first sign of that.

        A server whose engine has died waits for open requests before it ends, and they wait for the engine: the request alone would take
        until its timeout.
        """
        try:
            return call() if self._process is None else self._with_health_checks(self._process, call)
        except EngineError:
            self.check_alive(grace_s=GRACE_S)
            raise

    def _with_health_checks(self, process: ServerProcess, call: Callable[[], T]) -> T:
        outcome = in_background(call)
        while True:
            try:
                return outcome.result(timeout=HEALTH_INTERVAL_S)
            except TimeoutError:
                self.check_alive()
                if not self.api.answers("/health"):
                    process.end_unhealthy()

    def stop(self) -> None:
        """Stop our own server and remove its scratch folder; leave one that was found alone."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    @property
    def pid(self) -> int | None:
        """Of our own server's guardian, None if there is none."""
        return None if self._process is None else self._process.pid


@cache
def this_run() -> str:
    """A name for this process among all that may push weights to a server."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def stamp(version: int) -> str:
    """What a push leaves in a server: the version of the weights, and whose they are."""
    return f"{version} of run {this_run()}"


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def reachable(host: str) -> str:
    """Where a server that binds `host` is found from this machine."""
    host = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"[{host}]" if ":" in host else host
