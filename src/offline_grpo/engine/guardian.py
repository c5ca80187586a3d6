"""Runs one command and outlives its parent just long enough to clean up: a server must not survive its run.

    python -I guardian.py PARENT_PID DEATH_PIPE REMOVE -- COMMAND ...

Started by `process.py` in a process group of its own. The parent holds the write end of the pipe; `DEATH_PIPE` is our
file descriptor of its read end. When the parent closes it or dies, the command and its descendants get SIGTERM, then
SIGKILL. Then the folder `REMOVE` (empty: none) and the shared-memory files that only they used are deleted: killed
engines leave them behind. Exits with the command's exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)  # loaded here, because a process that was just forked must not
KILL_AFTER_S = 10.0
CLEANERS_TAKE_S = 2.0
POLL_S = 0.2
SHARED_MEMORY = "/dev/shm/"
CUDA_IPC_FILE = re.compile(r"torch_(?P<torch>\d+)_.*|cuda\.shm\.\w+\.(?P<driver>[0-9a-f]+)\.\d+")


def main(parent: int, pipe: int, remove: str, command: list[str]) -> int:
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the pipe stops us; the command gets default handlers
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the command inherits this; Slurm signals all of a job
    env = {**os.environ, "OFFLINE_GRPO_GUARDIAN": str(os.getpid())}
    run_began_s = psutil.Process(parent).create_time() - 1  # accurate to 1 s
    pids, used, names = {parent}, set(), set()
    try:
        server = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent,  # if we are killed
        )
        while server.poll() is None and os.getppid() == parent and not select.select([pipe], [], [], POLL_S)[0]:
            if names != (names := _names_in_shared_memory()):  # a file's owner is unknown once it has died
                pids |= _children()
                used |= _mapped(pids)
        pids |= _children()
        used |= _mapped(pids)
        _end(server)
    finally:
        by_name = {name for name, pid in _cuda_ipc_files().items() if pid in pids and not psutil.pid_exists(pid)}
        if ours := used | by_name:
            for name in ours - _mapped(psutil.pids()):
                with contextlib.suppress(OSError):
                    if os.stat(SHARED_MEMORY + name).st_ctime >= run_began_s:  # not older than the run
                        os.unlink(SHARED_MEMORY + name)
        if remove:
            shutil.rmtree(remove, ignore_errors=True)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends; on Linux alone."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of what our children leave behind when they end; on Linux alone."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        LIBC.prctl(option, value, 0, 0, 0)


def _end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to the command and to all that it started.

    Resource trackers (they delete their processes' semaphores) and guardians of servers that the command started come
    last: they exit once the others have.
    """
    if server.poll() is None:
        _signal(_children(), signal.SIGTERM)
    deadline = time.monotonic() + KILL_AFTER_S
    while time.monotonic() < deadline and server.poll() is None:
        time.sleep(0.05)
    started = time.monotonic()
    while (left := _children()) and time.monotonic() < started + KILL_AFTER_S:
        is_late = time.monotonic() > started + CLEANERS_TAKE_S
        _signal({pid for pid in left if is_late or not _cleans_up(pid)}, signal.SIGKILL)
        server.poll()
        for orphan in psutil.Process().children():
            if orphan.pid != server.pid:  # `server` must reap it
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan.pid, os.WNOHANG)
        time.sleep(0.05)
    server.wait()


def _cleans_up(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return b"resource_tracker" in command or os.fsencode(__file__) in command
    return False


def _children() -> set[int]:
    """All descendants, zombies too: a process whose main thread has exited is a zombie, but its other threads may
    hold its ports and memory.
    """
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _names_in_shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if os.path.isdir(SHARED_MEMORY) else set()


def _mapped(pids: Iterable[int]) -> set[str]:
    """Names of the top-level shared-memory files that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            found |= {line.partition(SHARED_MEMORY)[2].rstrip("\n") for line in file if SHARED_MEMORY in line}
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
            with contextlib.suppress(OSError):
                os.unlink(SHARED_MEMORY + name)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[5:]))
