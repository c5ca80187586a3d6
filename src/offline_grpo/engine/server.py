"""The inference server of a run: a managed one, which the run starts, watches and stops, or an external one, found at a
URL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psutil

from offline_grpo import progress
from offline_grpo.engine.background import in_background
from offline_grpo.engine.http import HEALTH_TIMEOUT_S, Refused, ServerApi
from offline_grpo.engine.launcher import Launcher
from offline_grpo.engine.ports import RELEASE_S, choose_port, plain_url, reachable
from offline_grpo.engine.process import Scratch, ServerProcess, temporary_folder, wait_until
from offline_grpo.errors import EngineDied, EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=Any)

GRACE_S = 5.0
"""How long a dying server may take to exit after a failed request."""
HEALTH_INTERVAL_S = 2.0
"""Interval of a server's health checks during a control call."""
PATIENCE_S = 30.0
"""Health-check timeout: vLLM's server has one thread, which long responses also keep busy."""


class Server:
    """An HTTP server that samples: a managed one, which the run starts, or an external one, which it finds at a URL.

    Args:
        base_url, api_key: of an external server.
        launcher: starts a managed server.
        log_dir: the first start's output goes to `server_0.log` there, the next one's to `server_1.log`, and so on.
        number: index of a managed server; its port is the configured one plus this.
        log_numbers: for log names; shared by servers that log to one folder.
        gpus: that a managed server may see; None: all, or none.
        args, env: what the weight-sync strategy adds to the command line and the environment of a managed server.
        key: the setting that `base_url` comes from, for messages.

    Attributes:
        watched_pid: of a server that another process of the run started; its exit is detected.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        launcher: Launcher | None = None,
        log_dir: Path,
        number: int = 0,
        log_numbers: Iterator[int] | None = None,
        gpus: Sequence[int] | None = None,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        key: str = "generation.base_url",
    ) -> None:
        assert (base_url is None) != (launcher is None), "a server is either found or started"
        self._launcher = launcher
        self.key = key
        self.log_dir = log_dir
        self._log_numbers = count() if log_numbers is None else log_numbers
        self.gpus = gpus
        self._args = dict(args or {})
        self._env = dict(env or {})
        self._process: ServerProcess | None = None
        self.watched_pid: int | None = None
        self._scratch: Scratch | None = None
        self._began_s: float | None = None  # set from `begin` until the server is ready
        self.api_key = api_key if launcher is None else launcher.api_key
        if launcher is not None:
            port = None if launcher.port is None else launcher.port + number
            self._port = choose_port(launcher.host, port, key="engine.port")
            base_url = f"http://{reachable(launcher.host)}:{self._port}"
        assert base_url is not None
        self.move_to(base_url)

    def move_to(self, base_url: str) -> None:
        """Send requests to this URL from now on."""
        self.base_url = plain_url(base_url)
        self.api = ServerApi(self.base_url, self.api_key)

    @property
    def is_managed(self) -> bool:
        """Whether the run starts it, so can restart it."""
        return self._launcher is not None

    @property
    def pid(self) -> int | None:
        """Of a managed server's guardian; None for an external server, or one that is not running."""
        return None if self._process is None else self._process.pid

    @property
    def scratch(self) -> Path:
        """A folder in shared memory for what the server reads from us.

        The guardian deletes it for a managed server; for an external one `stop` does, or the next run.
        """
        if self._scratch is None:
            self._scratch = Scratch()
        return self._scratch.path

    def begin(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """Start a managed server like `start`, but don't wait. No-op if already begun, or for an external server.

        Raises:
            ConfigError: the port is taken.
        """
        launcher = self._launcher
        if launcher is None or self._began_s is not None:
            return
        choose_port(launcher.host, self._port, key="engine.port", wait_s=RELEASE_S)
        for file in self.scratch.glob(f"{self._memory_file.name}*"):
            file.unlink()
        command = launcher.command(model, self._port, {**self._args, **(args or {})}) + launcher.key_args(self.scratch)
        ours = {**temporary_folder(self.scratch), "OFFLINE_GRPO_HAS_MEMORY": str(self._memory_file)}
        env = launcher.environment({**ours, **self._env}, self.gpus)
        log_path = self.log_dir / f"server_{next(self._log_numbers)}.log"
        log.info("starting %s; command and output in %s", launcher.name, log_path)
        self._began_s = time.monotonic()
        self._process = ServerProcess(command, env=env, log_path=log_path, remove=self.scratch)

    def start(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """Start a managed server on `model` and wait until it is healthy; for an external one, only check it.

        Args:
            args: added to the command line for this start.

        Raises:
            EngineError: it exited during startup, was not ready in time, or is unreachable.
            ConfigError: the port is taken.
        """
        if self._launcher is None:
            try:
                self.api.get("/health", timeout_s=HEALTH_TIMEOUT_S)
            except EngineError as error:
                raise EngineError(f"{self.key}={self.base_url}: no healthy server answers ({error})") from error
            return
        self.begin(model, args=args)
        self._wait_until(self.api.is_healthy)
        assert self._began_s is not None
        seconds, self._began_s = time.monotonic() - self._began_s, None
        log.info("%s is ready at %s after %.0f s", self._launcher.name, self.base_url, seconds)

    def wait_for_memory(self) -> None:
        """Wait until a server that `begin` started has taken its GPU's memory. Until then it profiles free memory: it
        counts others' allocations as its own, and exits if they free any. Raises like `start`.
        """
        if self._began_s is not None:
            self._wait_until(lambda: self._memory_file.exists() or self.api.is_healthy())

    @property
    def _memory_file(self) -> Path:
        return self.scratch / "has_memory"

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        launcher, process = self._launcher, self._process
        assert launcher is not None
        assert process is not None
        assert self._began_s is not None

        def is_up() -> bool:
            process.check_alive()
            return is_ready()

        what = f"{launcher.name} at {self.base_url}"
        with progress.phase("start server"):
            if not wait_until(is_up, what=what, since_s=self._began_s, timeout_s=launcher.start_timeout_s):
                process.stop()
                limit = f"{launcher.start_timeout_s:g} s (engine.start_timeout_s)"
                raise EngineError(f"{what} was not ready after {limit}; {process.last_words()}")

    @property
    def has_ended(self) -> bool:
        """Whether a server the run started exited; see `check_alive`."""
        try:
            self.check_alive()
        except EngineDied:
            return True
        return False

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        """Raise EngineDied if a server that the run started has ended, or ends within `grace_s` seconds."""
        deadline = time.monotonic() + grace_s
        while self._process is not None or self.watched_pid is not None:
            if self._process is not None:
                self._process.check_alive()
            elif self.watched_pid is not None and not _runs(self.watched_pid):
                raise EngineDied(
                    f"the server at {self.base_url}, which another process of this run started, has ended."
                )
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def check_healthy(self) -> None:
        """Raise EngineDied if a managed server has ended or is unhealthy: after its engine dies, it exits only once
        requests end.
        """
        self.check_alive()
        if self._process is None:
            return
        try:
            self.api.get("/health", timeout_s=PATIENCE_S)
        except EngineError:
            self.give_up("the server was unhealthy")

    def give_up(self, why: str) -> None:
        """Stop a managed server, whose state is unknown. Raises EngineDied."""
        if self._process is not None:
            self._process.stop()
            why = f"{why} and was stopped; {self._process.last_words()}"
        raise EngineDied(why)

    def watched(self, call: Callable[[], T], *, changes: bool = True) -> T:
        """Make a control call, and check a managed server's health meanwhile: if its engine has died, the call would
        block until its timeout. One that only reads is made again where no answer came.

        Raises:
            EngineDied: the server has ended, ends within seconds of a failed call, is unhealthy, or has not answered.
            EngineError: the server refused the call; it is alive.
        """
        outcome = in_background(call)
        while True:
            try:
                return outcome.result(timeout=HEALTH_INTERVAL_S)
            except TimeoutError:
                self.check_healthy()
            except EngineError as error:
                self.check_alive(grace_s=GRACE_S)
                if isinstance(error, Refused):
                    raise
                if not changes:
                    return self.watched(call)
                self.give_up(str(error))

    def stop(self) -> None:
        """Stop a managed server, and remove the scratch folder; external ones keep running."""
        if self._process is not None:
            is_unasked = self._began_s is not None and not self.has_ended  # its log does not say why the run ends
            self._process.stop()
            if is_unasked:
                self._process.log_path.unlink(missing_ok=True)
            self._process = self._began_s = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def next_to_start(waiting: Iterable[E]) -> list[E]:
    """Servers or engines that can start in parallel: they share no GPU.

    A starting vLLM server measures its memory use, and counts what another one allocates meanwhile as its own.
    """
    taken: set[int] = set()
    chosen = []
    for server in waiting:
        gpus = set(server.gpus or ())
        if not gpus & taken:
            chosen.append(server)
            taken |= gpus
    return chosen
