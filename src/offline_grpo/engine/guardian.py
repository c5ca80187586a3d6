"""Runs one command and outlives its parent just long enough to clean up: a server must not survive the run that started
it.

    python -I guardian.py PARENT_PID DEATH_PIPE REMOVE -- COMMAND ...

Started by `process.py`, in a process group of its own, with the standard library alone. The parent holds the other end
of the pipe `DEATH_PIPE` (a file descriptor, the read end): when it closes, because the parent let go or died by
whatever signal, the command's processes are terminated, then killed, and the folder `REMOVE` (empty: none) is deleted.
So are files in shared memory that only this run
used: engines that are killed leave theirs behind, and CUDA IPC those of a parent that is. Leaves with the command's
    exit code.
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

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_AFTER_S = 10.0
CLEANERS_TAKE_S = 2.0
POLL_S = 0.2
LOOK_S = 5.0
SHARED_MEMORY = "/dev/shm/"
CUDA_IPC_FILE = re.compile(r"torch_(?P<torch>\d+)_.*|cuda\.shm\.\w+\.(?P<driver>[0-9a-f]+)\.\d+")


def main(arguments: list[str]) -> int:
    parent, pipe, remove = int(arguments[0]), int(arguments[1]), arguments[2]
    command = arguments[4:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes that the server leaves behind become our children
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the pipe alone says when to stop; Slurm sends USR1 to the server too
    run_started = _start_time(parent)
    pids: set[int] = set()
    shared: set[str] = set()
    try:
        try:
            env = {**os.environ, "OFFLINE_GRPO_GUARDIAN": str(os.getpid())}
            server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, preexec_fn=lambda: _in_child(libc))
        except OSError as error:
            print(f"cannot start {command[0]}: {error}", flush=True)
            return 127
        names: list[str] = []
        next_look = 0.0
        while server.poll() is None and os.getppid() == parent and not _is_closed(pipe):
            before, names = names, _names_in_shared_memory()
            if (
                names != before or time.monotonic() >= next_look
            ):  # by whom a file was used cannot be told once they are dead
                pids |= {parent, *_children()}
                shared |= _shared_files(pids)
                next_look = time.monotonic() + LOOK_S
        pids |= {parent, *_children()}
        shared |= _shared_files(pids)
        _terminate(server)
    finally:
        _remove_unused(shared | _named_after_dead(pids), newer_than=run_started)
        if remove:
            shutil.rmtree(remove, ignore_errors=True)
    code = server.returncode
    return code if code >= 0 else 128 - code


def _in_child(libc: ctypes.CDLL) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should the guardian itself be killed


def _is_closed(pipe: int) -> bool:
    """Wait for up to `POLL_S` for the parent's end to close."""
    readable, _, _ = select.select([pipe], [], [], POLL_S)
    return bool(readable)  # nothing is ever written


def _terminate(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to the command and to all that it started.

    Those that clean up come last, because they end by themselves once the others have: Python's resource trackers,
    which delete the semaphores of their processes, and the guardians of servers that the command started.
    """
    if server.poll() is None:
        _signal(_children(), signal.SIGTERM)
    deadline = time.monotonic() + KILL_AFTER_S
    while time.monotonic() < deadline and server.poll() is None:
        time.sleep(0.05)
    started = time.monotonic()
    while (left := _children()) and time.monotonic() < deadline + KILL_AFTER_S:
        is_late = time.monotonic() > started + CLEANERS_TAKE_S
        _signal([pid for pid in left if is_late or not _cleans_up(pid)], signal.SIGKILL)
        _reap(server)
        time.sleep(0.05)
    server.wait()


def _cleans_up(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
            return b"resource_tracker" in command or os.fsencode(__file__) in command
    except OSError:
        return False


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Collect every child that has ended. Only `server` itself may collect the server: it takes a missing exit status
    for success.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == server.pid:
                server.poll()
            else:
                os.waitpid(ended.si_pid, 0)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _names_in_shared_memory() -> list[str]:
    try:
        return os.listdir(SHARED_MEMORY)
    except OSError:
        return []


def _shared_files(pids: Iterable[int]) -> set[str]:
    """The files in shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            paths = {fields[5].rstrip("\n") for line in file if len(fields := line.split(maxsplit=5)) == 6}
            found |= {
                path for path in paths if path.startswith(SHARED_MEMORY) and "/" not in path.removeprefix(SHARED_MEMORY)
            }
    return found


def _named_after_dead(pids: set[int]) -> set[str]:
    """The files of CUDA IPC, which carry the id of the process that made them and are mapped for a moment only."""
    return {path for path, pid in _cuda_ipc_files().items() if pid in pids and not os.path.exists(f"/proc/{pid}")}


def _cuda_ipc_files() -> dict[str, int]:
    """Paths, and who made them."""
    owners = {SHARED_MEMORY + name: CUDA_IPC_FILE.fullmatch(name) for name in _names_in_shared_memory()}
    return {path: int(owner["torch"] or int(owner["driver"], 16)) for path, owner in owners.items() if owner}


def remove_cuda_driver_files() -> None:
    """For the end of a process that used CUDA IPC: delete what the driver leaves of it, and of servers that have ended
    before it.
    """
    mapped = _shared_files([os.getpid()])
    for path, pid in _cuda_ipc_files().items():
        is_ours = pid == os.getpid() or (path in mapped and not os.path.exists(f"/proc/{pid}"))
        if is_ours and path.startswith(SHARED_MEMORY + "cuda"):  # torch deletes its own, and would miss them
            with contextlib.suppress(OSError):
                os.unlink(path)


def _remove_unused(paths: set[str], *, newer_than: float) -> None:
    """Delete those that no process uses any more. What was there before the run is not the run's."""
    if not paths:
        return
    for path in paths - _shared_files(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.stat(path).st_ctime >= newer_than:
                os.unlink(path)


def _start_time(pid: int) -> float:
    """Seconds since the epoch; to a hundredth, and a second early rather than late."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/stat", "rb") as file:
            [booted] = [int(line.split()[1]) for line in file if line.startswith(b"btime")]
    except (OSError, ValueError):  # it has ended already
        return time.time()
    return booted + ticks / os.sysconf("SC_CLK_TCK") - 1


def _children() -> list[int]:
    """Every process below this one, from /proc, until it has gone: one whose first thread has ended is a zombie, while
    others of its threads may still hold its ports and its memory."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
