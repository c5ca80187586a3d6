"""A server process: started through `guardian.py` in a process group of its own, watched, and stopped with all that it
started.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from offline_grpo.engine.command_line import shown
from offline_grpo.errors import EngineDied, EngineError

log = logging.getLogger(__name__)

GUARDIAN = Path(__file__).with_name("guardian.py")
STOP_TIMEOUT_S = 25.0  # the guardian terminates, waits 10 s, kills
POLL_S = 0.25
PROGRESS_INTERVAL_S = 10.0
EXCEPTION = re.compile(r"(\b[\w.]*(Error|Exception)|\berror): \S.*", re.ASCII)
POINTER = re.compile(r"see (stack trace|root cause)", re.IGNORECASE)
"""In exceptions that point at another one. An engine that is killed leaves no other."""


def usable_cores() -> int:
    """Of the machine's, those that this process may use, as far as its affinity says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ServerProcess:
    """A running command whose output goes to `log_path`.

    It ends with this object's `stop`, when this process exits, and when this process is killed, whatever the signal.

    Args:
        log_path: the command line and then everything that the command prints.
        remove: a folder that belongs to the command, deleted after it has ended, however the command ended.

    Raises:
        EngineError: the command cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, remove: Path | None = None
    ) -> None:
        self.command = list(command)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._pipe = os.pipe()
        guardian = [sys.executable, "-I", str(GUARDIAN), str(os.getpid()), str(read_end), str(remove or ""), "--"]
        try:
            with open(
                log_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)
            ) as output:  # SGLang prints its key
                output.write(f"$ {shown(command)}\n".encode())
                output.flush()
                self._guardian = subprocess.Popen(
                    [*guardian, *command],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._pipe)
            raise EngineError(f"the server cannot be started ({error})") from error
        finally:
            os.close(read_end)
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """Of the guardian, which is the parent of the server and leads its process group."""
        return self._guardian.pid

    @property
    def exit_code(self) -> int | None:
        """128 + N after signal N; None while the command runs."""
        had_ended = self._guardian.returncode is not None
        code = self._guardian.poll()
        if code is None or code >= 0:
            return code
        if (
            not had_ended
        ):  # the guardian itself was killed, and the server with it: what the server has started is left to us
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guardian.pid, signal.SIGKILL)
        return 128 - code

    def how_it_ended(self) -> str | None:
        """`has ended (exit code 1)`, and the last error lines of the log; None while it runs."""
        code = self.exit_code
        if code is None:
            return None
        why = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        return f"has ended ({why}); {last_lines(self.log_path)} The whole log: {self.log_path}"

    def check_alive(self) -> None:
        """Raise EngineDied if the server has ended."""
        if (end := self.how_it_ended()) is not None:
            raise EngineDied(f"the server {end}")

    def end_unhealthy(self) -> NoReturn:
        """Stop a server that runs but cannot work any more, and raise EngineDied."""
        self.stop()
        raise EngineDied(
            f"the server was not healthy any more and was stopped; {last_lines(self.log_path)} The whole log: {self.log_path}"
        )

    def wait_until(
        self, is_ready: Callable[[], bool], *, timeout_s: float, what: str, since_s: float | None = None
    ) -> None:
        """Wait until `is_ready()`, telling every ten seconds for how long, and what the server printed last.

        Args:
            since_s: when the wait began, on the clock `time.monotonic`; None: now.

        Raises:
            EngineDied: the server ended first.
            EngineError: `timeout_s` passed first; the server has been stopped.
        """
        told = time.monotonic()
        started = told if since_s is None else since_s
        while not is_ready():
            self.check_alive()
            now = time.monotonic()
            if now - started > timeout_s:
                self.stop()
                raise EngineError(
                    f"{what} was not ready after {timeout_s:g} s (engine.start_timeout_s); {last_lines(self.log_path)} "
                    f"The whole log: {self.log_path}"
                )
            if now - told >= PROGRESS_INTERVAL_S:
                told = now
                log.info("waiting for %s: %.0f s; %s", what, now - started, last_line(self.log_path))
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the server and wait until it has gone. Does nothing the second time."""
        atexit.unregister(self.stop)
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            self._guardian.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._guardian.pid, signal.SIGKILL)
            self._guardian.wait()


def last_line(path: Path) -> str:
    """The newest line of a log, cut to 120 characters."""
    lines = _tail(path)
    return lines[-1][:120] if lines else "(nothing printed yet)"


def last_lines(path: Path, *, count: int = 2) -> str:
    """What a log says about an error, as one line of text: the last exceptions in it, else its last lines."""
    lines = _tail(path)
    searched = (
        EXCEPTION.search(line) for line in lines if " WARNING " not in line
    )  # those speak of exceptions that may come
    exceptions = list(dict.fromkeys(found[0].strip() for found in searched if found))
    causes = [text for text in exceptions if not POINTER.search(text)]
    chosen = (causes or exceptions or lines)[-count:]
    return (
        "its last words: " + " | ".join(line.strip()[:300].rstrip(".") for line in chosen) + "."
        if chosen
        else "it printed nothing."
    )


def _tail(path: Path, num_bytes: int = 2**20) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
