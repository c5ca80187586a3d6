"""A command that never outlives the run, however the run ends: `Child` is the run's handle of it.

Between the two stands the guardian: `main`, in a Python process and a process group of its own. The run holds the write
end of a pipe, the guardian the read end. When the run closes it or dies, the command and its descendants get SIGTERM,
then SIGKILL. Then the folder `REMOVE` (empty: none) goes, and the files in shared memory that only they used, which
killed engines leave behind. The guardian exits with the command's exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from offline_grpo.disk import OwnFolder, user_cache
from offline_grpo.errors import EngineDied, exit_code_of, how_ended

STOP_TIMEOUT_S = 25.0  # the guardian terminates, waits `KILL_AFTER_S`, kills
KILL_AFTER_S = 10.0
CLEANERS_TAKE_S = 2.0
POLL_S = 0.2
TAIL_BYTES = 2**20
EXCEPTION = re.compile(r"(\b[\w.]*(Error|Exception)|\berror): \S.*", re.ASCII)
POINTER = re.compile(r"see (stack trace|root cause)", re.IGNORECASE)
PREFIXED = re.compile(r"^\(.*? pid=\d+\) ?")  # of vLLM's lines

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "offline-grpo-"
GUARDIAN = "offline-grpo-guardian"  # a guardian's first argument, by which people find it among processes
CUDA_IPC_FILE = re.compile(r"torch_(?P<torch>\d+)_.*|cuda\.shm\.\w+\.(?P<driver>[0-9a-f]+)\.\d+")
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
"""Where a run and its servers keep what they compile: variable, and folder in the user's cache."""
OF_THE_SHELL = {name: os.environ[name] for name in COMPILED if name in os.environ}
"""Read before torch and transformers set them to folders in /tmp, which later servers would inherit."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None)  # loaded here, because a process that was just forked must not


class Lost(EngineDied):
    """A child on another machine has gone with that, or with whatever watched it there."""


class Child:
    """A running command. It ends with `stop`, when this process exits, and when this process is killed.

    Args:
        log_path: gets the command line, and then everything that the command prints.
        remove: a folder that belongs to the command, deleted after it has ended, however the command ended.
    """

    is_placed = True

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, remove: Path | None = None
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)

        # The guardian: it finds the package where the run did, and ends the command when the pipe is closed.
        read_end, write_end = os.pipe()
        self._pipe: int | None = write_end
        root = str(Path(__file__).parents[2])  # where this package is, also where PYTHONPATH alone leads to it
        start = f"import sys; sys.path.append({root!r}); from offline_grpo.engine.spawn import main; main()"
        guardian = [sys.executable, "-I", "-c", start, GUARDIAN, str(os.getpid()), str(read_end), str(remove or "")]
        guardian.append("--")

        # Output goes to the log, after the command line. Other users cannot read it: SGLang prints its key.
        private = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
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
        return exit_code_of(code)

    def how_it_ended(self) -> str | None:
        """`has ended (exit code 1)` or `was stopped`, the last error lines of the log, and where the whole log is; None
        while it runs.
        """
        if (code := self.exit_code) is None:
            return None
        why = "was stopped" if self._pipe is None else f"has ended ({how_ended(code)})"
        return f"{why}; {last_lines(self.log_path)} The whole log: {self.log_path}"

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


def last_lines(path: Path, *, count: int = 2) -> str:
    """The last exceptions in a log, else its last lines, as one line of text."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("$ ")]  # the command

    # Warnings speak of what may come; of a validation error the lines that follow say what is wrong.
    exceptions = []
    for number, line in enumerate(lines):
        if (found := EXCEPTION.search(line)) and " WARNING " not in line:
            more = lines[number + 1 : number + 3] if "validation error" in line else []
            more = [PREFIXED.sub("", each).partition(" [type=")[0] for each in more if "pydantic.dev" not in each]
            exceptions.append(": ".join(map(str.strip, [found[0], *more])))

    # An exception that only points at another one says less than that one.
    exceptions = list(dict.fromkeys(exceptions))
    causes = [text for text in exceptions if not POINTER.search(text)]
    chosen = (causes or exceptions or lines)[-count:]
    words = " | ".join(line.strip()[:300].rstrip(".") for line in chosen)
    return f"its last words: {words}." if chosen else "it was silent."


# Where a child runs, and what it may keep


class Scratch(OwnFolder):
    """A new private folder, in memory where the machine has `/dev/shm`. It does not outlive its run."""

    def __init__(self) -> None:
        super().__init__(SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()), PREFIX)


def kept_compiled() -> dict[str, str]:
    """Environment of a process whose compiled kernels stay."""
    return {name: OF_THE_SHELL.get(name) or str(user_cache(kept)) for name, kept in COMPILED.items()}


def usable_cores() -> int:
    """Of the machine's, those that this process may use, as far as its affinity says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for GPUs numbered as this process sees them."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(ours.split(",")[gpu] if ours else str(gpu) for gpu in gpus)


def without_launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Free of what a launcher of several training processes sets: the child would take itself for one of them."""
    launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("TORCHELASTIC_", "ACCELERATE_")
    return {name: value for name, value in environment.items() if name not in launch and not name.startswith(prefixes)}


# The guardian


def main() -> None:
    """The guardian: `python -c ... offline-grpo-guardian PARENT_PID DEATH_PIPE REMOVE -- COMMAND ...`."""
    _, _, given, pipe, remove, _, *words = sys.argv
    parent = int(given)

    # Only the pipe stops us; the command gets default handlers. It inherits that SIGUSR1 is ignored: Slurm signals all
    # of a job.
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    env = {**os.environ, "OFFLINE_GRPO_GUARDIAN": str(os.getpid())}
    run_began_s = psutil.Process(parent).create_time() - 1  # accurate to 1 s
    pids, used, names = {parent}, set(), set()
    try:
        # Until the command ends, or the run does: who has which file in shared memory. Of a file whose process has died
        # nobody knows any more.
        command = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)
        while command.poll() is None and os.getppid() == parent and not select.select([int(pipe)], [], [], POLL_S)[0]:
            if names != (names := _names_in_shared_memory()):
                pids |= _descendants()
                used |= _mapped(pids)
        pids |= _descendants()
        used |= _mapped(pids)

        # The end of the command, and of all that it has started: they are asked first.
        if command.poll() is None:
            for pid in _descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + KILL_AFTER_S
        while time.monotonic() < deadline and command.poll() is None:
            time.sleep(0.05)

        # Whoever is left is killed. Resource trackers (they delete their processes' semaphores) and guardians that the
        # command started come last: they exit once the others have.
        started = time.monotonic()
        while (left := _descendants()) and time.monotonic() < started + KILL_AFTER_S:
            is_late = time.monotonic() > started + CLEANERS_TAKE_S
            for pid in left:
                with contextlib.suppress(OSError):  # it has gone by itself
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if is_late or not (b"resource_tracker" in line or GUARDIAN.encode() in line):
                        os.kill(pid, signal.SIGKILL)
            command.poll()
            for orphan in psutil.Process().children():
                if orphan.pid != command.pid:  # `command` must reap it
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(orphan.pid, os.WNOHANG)
            time.sleep(0.05)
        command.wait()
    finally:
        # What only the run and its command have mapped goes, unless it is older than the run.
        by_name = {name for name, pid in _cuda_ipc_files().items() if pid in pids and not psutil.pid_exists(pid)}
        if ours := used | by_name:
            for name in ours - _mapped(psutil.pids()):
                with contextlib.suppress(OSError):
                    if (SHARED_MEMORY / name).stat().st_ctime >= run_began_s:
                        (SHARED_MEMORY / name).unlink()
        if remove:
            shutil.rmtree(remove, ignore_errors=True)
    sys.exit(exit_code_of(command.returncode))


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends; on Linux alone."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of what our children leave behind when they end; on Linux alone."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> set[int]:
    """Zombies too: a process whose main thread has exited is a zombie, but its other threads may hold its ports and
    memory.
    """
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _names_in_shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _mapped(pids: Iterable[int]) -> set[str]:
    """Names of the top-level shared-memory files that these processes have mapped."""
    found, folder = set(), f"{SHARED_MEMORY}/"
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            found |= {line.partition(folder)[2].rstrip("\n") for line in file if folder in line}
    return {name for name in found if "/" not in name}


def _cuda_ipc_files() -> dict[str, int]:
    """CUDA IPC files, which are mapped only briefly, and the PIDs that made them."""
    found = {name: CUDA_IPC_FILE.fullmatch(name) for name in _names_in_shared_memory()}
    return {name: int(match["torch"] or int(match["driver"], 16)) for name, match in found.items() if match}


def remove_cuda_driver_files() -> None:
    """Call as a process that used CUDA IPC exits: deletes its driver files and those of dead servers."""
    mapped = _mapped([os.getpid()])
    for name, pid in _cuda_ipc_files().items():
        is_ours = pid == os.getpid() or (name in mapped and not psutil.pid_exists(pid))
        if is_ours and name.startswith("cuda"):  # torch deletes its own, and would miss them
            (SHARED_MEMORY / name).unlink(missing_ok=True)
