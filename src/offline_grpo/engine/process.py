"""A process that ends with the run: started through `guardian.py` in a process group of its own, watched, and stopped
with all that it started.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offline_grpo.disk import OwnFolder, user_cache
from offline_grpo.errors import EngineDied
from offline_grpo.progress import LOG_ALONE

log = logging.getLogger(__name__)

GUARDIAN = Path(__file__).with_name("guardian.py")
STOP_TIMEOUT_S = 25.0  # the guardian terminates, waits 10 s, kills
POLL_S = 0.25
PROGRESS_INTERVAL_S = 30.0
TAIL_BYTES = 2**20
EXCEPTION = re.compile(r"(\b[\w.]*(Error|Exception)|\berror): \S.*", re.ASCII)
POINTER = re.compile(r"see (stack trace|root cause)", re.IGNORECASE)
"""In exceptions that point at another one."""
PREFIXED = re.compile(r"^\(.*? pid=\d+\) ?")
"""Of vLLM's lines."""

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "offline-grpo-"
LONGEST_SOCKET_FOLDER = 107 - len("/") - 36
"""Bytes of a folder in which a socket may have a UUID for its name: the kernel allows 107 for the whole path."""
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
"""Where a run and its servers keep what they compile: variable, and folder in the user's cache."""
OF_THE_SHELL = {name: os.environ[name] for name in COMPILED if name in os.environ}
"""Read before torch and transformers set them to folders in /tmp, which later servers would inherit."""


def usable_cores() -> int:
    """Of the machine's, those that this process may use, as far as its affinity says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ServerProcess:
    """A running command whose output goes to `log_path`.

    It ends with this object's `stop`, when this process exits, and when this process is killed, whatever the signal.

    Args:
        log_path: the command line and then everything that the command prints.
        remove: a folder that belongs to the command, deleted after it has ended, however the command ended.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, remove: Path | None = None
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        self._pipe: int | None = write_end
        guardian = [sys.executable, "-I", str(GUARDIAN), str(os.getpid()), str(read_end), str(remove or ""), "--"]
        private = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # SGLang prints its key
        with open(private, "wb") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
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
        os.close(read_end)
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """Of the guardian, which is the parent of the command and leads its process group."""
        return self._guardian.pid

    @property
    def exit_code(self) -> int | None:
        """128 + N after signal N; None while the command runs."""
        code = self._guardian.poll()
        if code is None or code >= 0:
            return code
        self._kill()  # the guardian itself was killed: what the command has started is left to us
        return 128 - code

    def how_it_ended(self) -> str | None:
        """`has ended (exit code 1)`, and the last error lines of the log; None while it runs."""
        if (code := self.exit_code) is None:
            return None
        why = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        return f"has ended ({why}); {self.last_words()}"

    def last_words(self) -> str:
        """The last lines of the log that speak of an error, and where the whole log is."""
        return f"{last_lines(self.log_path)} The whole log: {self.log_path}"

    def check_alive(self) -> None:
        """Raise EngineDied if the server has ended."""
        if (end := self.how_it_ended()) is not None:
            raise EngineDied(f"the server {end}")

    def stop(self) -> None:
        """End the command and wait until it has gone. Does nothing the second time."""
        atexit.unregister(self.stop)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        try:
            self._guardian.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._guardian.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guardian.pid, signal.SIGKILL)


def wait_until(is_ready: Callable[[], bool], *, what: str, since_s: float, timeout_s: float) -> bool:
    """Wait until `is_ready()`, and log now and then for how long. Returns False if it took `timeout_s`.

    Args:
        since_s: when the wait began, on the clock `time.monotonic`.
    """
    told = since_s
    while not is_ready():
        now = time.monotonic()
        if now - since_s > timeout_s:
            return False
        if now - told >= PROGRESS_INTERVAL_S:
            told = now
            log.info("waiting for %s: %.0f s", what, now - since_s, extra=LOG_ALONE)  # the screen has the phase
        time.sleep(POLL_S)
    return True


def last_line(path: Path) -> str:
    """The newest line of a log, cut to 120 characters."""
    lines = path.read_text(errors="replace").rstrip().splitlines()
    return lines[-1][:120] if lines else "(nothing printed yet)"


def last_lines(path: Path, *, count: int = 2) -> str:
    """The last exceptions in a log, else its last lines, as one line of text."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("$ ")]  # the command
    exceptions = []
    for number, line in enumerate(lines):
        if (found := EXCEPTION.search(line)) and " WARNING " not in line:  # those speak of what may come
            more = lines[number + 1 : number + 3] if "validation error" in line else []
            more = [PREFIXED.sub("", each).partition(" [type=")[0] for each in more if "pydantic.dev" not in each]
            exceptions.append(": ".join(map(str.strip, [found[0], *more])))
    exceptions = list(dict.fromkeys(exceptions))
    causes = [text for text in exceptions if not POINTER.search(text)]
    chosen = (causes or exceptions or lines)[-count:]
    words = " | ".join(line.strip()[:300].rstrip(".") for line in chosen)
    return f"its last words: {words}." if chosen else "it was silent."


class Scratch(OwnFolder):
    """A new private folder, in memory where the machine has `/dev/shm`. It does not outlive its run."""

    def __init__(self) -> None:
        super().__init__(SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()), PREFIX)


def temporary_folder(scratch: Path) -> dict[str, str]:
    """Environment of a server whose sockets and temporary files go away with its scratch folder, and whose compiled
    kernels stay.
    """
    folder = scratch / "tmp"
    if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:  # on a machine without /dev/shm
        return {}
    folder.mkdir(exist_ok=True)
    return {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder), **kept_compiled()}


def kept_compiled() -> dict[str, str]:
    """Environment of a process whose compiled kernels stay."""
    return {name: OF_THE_SHELL.get(name) or str(user_cache(kept)) for name, kept in COMPILED.items()}
