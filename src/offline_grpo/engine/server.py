"""The inference server of a run: a managed one, which the run starts, watches and stops, or an external one, found at a
URL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psutil

from offline_grpo import progress
from offline_grpo.engine.background import in_background
from offline_grpo.engine.command_line import shown
from offline_grpo.engine.http import HEALTH_TIMEOUT_S, Late, ServerApi, plain_url, reachable
from offline_grpo.engine.launcher import Launcher
from offline_grpo.engine.patience import Patience
from offline_grpo.engine.ports import choose_again, choose_port
from offline_grpo.engine.process import ServerProcess
from offline_grpo.engine.scratch import Scratch, temporary_folder
from offline_grpo.errors import EngineDied, EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 5.0
"""How long after a failed request a managed server that is ending may take to end."""
HEALTH_INTERVAL_S = 2.0
"""How often a server is asked for its health while a request to it is open."""


class Server:
    """An HTTP server that samples: a managed one, which the run starts, or an external one, which it finds at a URL.

    Args:
        base_url: of an external server; None for a managed one.
        api_key: of an external server; the launcher has that of a managed one.
        launcher: starts a managed server.
        log_dir: the first start's output goes to `server_0.log` there, the next one's to `server_1.log`, and so on.
        number: of a managed server among several, which take the ports from the configured one on.
        log_numbers: of the logs; several servers that log into one folder share them.
        gpus: what a managed server may see.
        args, env: what the weight-sync strategy adds to the command line and the environment of a managed server.
        key: the setting that `base_url` comes from, for messages.
    """

    def __init__(
        self,
        *,
        base_url: str | None,
        api_key: str | None,
        launcher: Launcher | None,
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
        self._watched_pid: int | None = None
        self._scratch: Scratch | None = None
        self._patience = Patience()
        self._began_s: float | None = None  # while a server that `begin` started is not waited for yet
        self.num_starts = 0
        self.api_key = api_key if launcher is None else launcher.api_key
        if launcher is not None:
            port = None if launcher.port is None else launcher.port + number
            self._port = choose_port(launcher.host, port, key="engine.port")
            base_url = f"http://{reachable(launcher.host)}:{self._port}"
        assert base_url is not None
        self.move_to(base_url)

    def move_to(self, base_url: str) -> None:
        """From now on the server is asked there."""
        self.base_url = plain_url(base_url)
        self.api = ServerApi(self.base_url, self.api_key)

    @property
    def is_managed(self) -> bool:
        """Whether the run starts it, and so may start it again."""
        return self._launcher is not None

    @property
    def version_key(self) -> str:
        """The setting that decides which version answers."""
        return "engine.python" if self.is_managed else self.key

    @property
    def scratch(self) -> Path:
        """A folder in shared memory for what the server reads from us.

        The guardian deletes it for a managed server; for an external one `stop` does, or the next run.
        """
        if self._scratch is None:
            self._scratch = Scratch()
        return self._scratch.path

    def begin(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """Start a managed server and go on: `start` with the same words waits for it. An external one runs already.

        One that was begun with the same words goes on, one that was begun with others is stopped first.

        Raises:
            EngineError: it cannot be started.
            ConfigError: the port is taken.
        """
        if self._launcher is None:
            return
        command = self._command(model, args)
        if self._began_s is not None and self._process is not None:
            if self._process.command == command:
                return
            self.stop()
            command = self._command(model, args)  # it names a file in the scratch folder, which is another one now
        (choose_again if self.num_starts else choose_port)(self._launcher.host, self._port, key="engine.port")
        log.info("starting %s: %s", self._launcher.name, shown(command))
        log_path = self.log_dir / f"server_{next(self._log_numbers)}.log"
        self.num_starts += 1
        for file in self.scratch.glob(f"{self._memory_file.name}*"):
            file.unlink()
        ours = {**temporary_folder(self.scratch), "OFFLINE_GRPO_HAS_MEMORY": str(self._memory_file)}
        env = self._launcher.environment({**ours, **self._env}, self.gpus)
        self._began_s, self._patience = time.monotonic(), Patience()
        self._process = ServerProcess(command, env=env, log_path=log_path, remove=self.scratch)

    def _command(self, model: str, args: Mapping[str, Any] | None) -> list[str]:
        assert self._launcher is not None
        return self._launcher.command(model, self._port, {**self._args, **(args or {})}) + self._launcher.key_args(
            self.scratch
        )

    def start(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        """Start a managed server on `model` and wait until it is healthy; of an external one, only check that it is.

        Args:
            args: added to the command line for this start.

        Raises:
            EngineError: it cannot be started, ended while it started, was not ready in time, or is not there.
            ConfigError: the port is taken.
        """
        if self._launcher is None:
            try:
                self.api.get("/health", timeout_s=HEALTH_TIMEOUT_S)
            except EngineError as error:
                start_one = f"python -m offline_grpo.engine.serve {model} starts a vLLM server"
                raise EngineError(
                    f"{self.key}={self.base_url}: no healthy server answers ({error}); {start_one}"
                ) from error
            return
        self.begin(model, args=args)
        self._wait_until(lambda: self.api.answers("/health"))
        assert self._process is not None
        assert self._began_s is not None
        seconds, self._began_s = time.monotonic() - self._began_s, None
        log.info(
            "%s is ready at %s after %.0f s; its log: %s",
            self._launcher.name,
            self.base_url,
            seconds,
            self._process.log_path,
        )

    def wait_for_memory(self) -> None:
        """Wait until a server that `begin` started has taken its GPU's memory. Before, it measures what is free: what
        others allocate then is taken for its own, and it ends if they free something.

        Raises:
            EngineError: as `start`.
        """
        if self._began_s is not None:
            self._wait_until(lambda: self._memory_file.exists() or self.api.answers("/health"))

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        assert self._launcher is not None
        assert self._process is not None
        what, timeout_s = f"{self._launcher.name} at {self.base_url}", self._launcher.start_timeout_s
        with progress.phase("start server"):
            self._process.wait_until(is_ready, timeout_s=timeout_s, what=what, since_s=self._began_s)

    @property
    def _memory_file(self) -> Path:
        return self.scratch / "has_memory"

    @property
    def is_ready(self) -> bool:
        """Whether `start` need not wait for a server that `begin` started: it is healthy, has ended, or takes too long."""
        assert self._launcher is not None
        assert self._began_s is not None
        is_late = time.monotonic() - self._began_s > self._launcher.start_timeout_s
        return self.api.answers("/health") or is_late or self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether a managed server has; see `check_alive`."""
        try:
            self.check_alive()
        except EngineDied:
            return True
        return False

    @property
    def is_observed(self) -> bool:
        """Whether `check_alive` would notice its end: of a server that the run has started."""
        return self._process is not None or self._watched_pid is not None

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        """Raise EngineDied if a managed server has ended, or ends within `grace_s` seconds; an external one always
        passes.
        """
        deadline = time.monotonic() + grace_s
        while self.is_observed:
            self._look()
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def _look(self) -> None:
        """Raise EngineDied if it has ended."""
        if self._process is not None:
            self._process.check_alive()
        elif self._watched_pid is not None and _has_ended(self._watched_pid):
            raise EngineDied(f"the server at {self.base_url}, which another process of this run started, has ended.")

    def check_healthy(self) -> None:
        """Raise EngineDied if a managed server has ended or is unhealthy: one whose engine has died ends only when its
        requests have. One that answers late has time (see `Patience`): vLLM's has one thread, which long answers keep
        busy too."""
        self.check_alive()
        if self._process is None:
            return
        asked_s = time.monotonic()
        try:
            self.api.get("/health", timeout_s=HEALTH_TIMEOUT_S)
            self._patience.well()
        except Late:
            if self._patience.is_over(asked_s=asked_s, now_s=time.monotonic()):
                self._process.end_unhealthy()
        except EngineError:
            self._process.end_unhealthy()

    def watch(self, pid: int | None) -> None:
        """Treat a server started by rank 0 as managed; watch `pid`."""
        self._watched_pid = pid

    def watched(self, call: Callable[[], T]) -> T:
        """Run a request while polling health; raise EngineDied if a managed server exits or turns unhealthy.

        Without the polling a request would wait until its timeout: a server whose engine has died ends only when its
        open requests have, and they wait for the engine.

        Raises:
            EngineDied: see above; also if the server ends within seconds of a failed request, which may be the first
            sign of it. EngineError: the request failed, and the server lives.
        """
        try:
            return self._with_health_checks(call) if self._is_watched else call()
        except EngineDied:
            raise
        except EngineError:
            self.check_alive(grace_s=GRACE_S)
            raise

    @property
    def _is_watched(self) -> bool:
        return self._process is not None

    def _with_health_checks(self, call: Callable[[], T]) -> T:
        outcome = in_background(call)
        while True:
            try:
                return outcome.result(timeout=HEALTH_INTERVAL_S)
            except TimeoutError:
                self.check_healthy()

    def stop(self) -> None:
        """Stop a managed server, and remove the scratch folder; an external server goes on."""
        if self._process is not None:
            is_unasked = (
                self._began_s is not None and not self.has_ended
            )  # so its log says nothing about why the run ends
            self._process.stop()
            if is_unasked:
                self._process.log_path.unlink(missing_ok=True)
            self._process = self._began_s = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    @property
    def pid(self) -> int | None:
        """Of a managed server's guardian; None for an external server, or one that is not running."""
        return None if self._process is None else self._process.pid


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
