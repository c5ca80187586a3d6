"""A server's process ends with the run that started it, however that ends, and takes along all that it started and had
in shared memory. No vLLM here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from offline_grpo.engine.spawn import Child, last_lines

PYTHON = [sys.executable, "-I", "-S"]
WAIT_S = 15.0

FAMILY = """
import os, signal, sys, time
folder = sys.argv[1]
def note(name):
    with open(f"{folder}/.{name}", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{folder}/.{name}", f"{folder}/{name}")
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("deaf")
    time.sleep(100)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("daemon")
        time.sleep(100)
    os._exit(0)
note("server")
time.sleep(100)
"""
"""A server that leaves a child which ignores SIGTERM, and a daemon: a grandchild in a session of its own whose parent
has ended.
"""
MEMBERS = ("server", "deaf", "daemon")

Starter = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts a command in `tmp_path`, and stops it after the test."""
    started: list[Child] = []

    def start(*command: str, remove: Path | None = None) -> Child:
        started.append(Child(command, env=os.environ, log_path=tmp_path / "logs" / "server.log", remove=remove))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def python(code: str, *arguments: object) -> list[str]:
    return [*PYTHON, "-c", code, *map(str, arguments)]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family_of(folder: Path) -> dict[str, int]:
    """Ids of a family that has come up completely."""
    wait_for(lambda: all((folder / name).exists() for name in MEMBERS), "the family")
    pids = {name: int((folder / name).read_text()) for name in MEMBERS}
    assert all(map(is_running, pids.values()))
    return pids


def folder_with_a_file(path: Path) -> Path:
    path.mkdir()
    (path / "weights").write_bytes(b"x")
    return path


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it was silent."),
        ("KeyError: 0\nIOError: 1\n at\n(pid=7) t.A_Error: 2\nbye", "its last words: IOError: 1 | t.A_Error: 2."),
        ("(A pid=1) p.XError: 1 validation error for C\n(A pid=1)   Bad b. [type=x]\n(A pid=1)  errors.pydantic.dev",
         "its last words: p.XError: 1 validation error for C: Bad b."),
        (" WARNING this may raise ValueError: 1\nbye", "its last words: WARNING this may raise ValueError: 1 | bye."),
    ],
)  # fmt: skip
def test_last_words(log: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(log)
    assert last_lines(path) == words


# How it ends


PARENT = """
import os, sys, time
from pathlib import Path
from offline_grpo.engine.spawn import Child
folder, ending, *command = sys.argv[1:]
server = Child(command, env=os.environ, log_path=Path(folder, "server.log"), remove=Path(folder, "scratch"))
def note(name, pid):
    Path(folder, f".{name}").write_text(str(pid))
    os.replace(Path(folder, f".{name}"), Path(folder, name))
if ending == "forked" and os.fork() == 0:  # a copy of this process that holds the pipe too, and goes on
    note("copy", os.getpid())
    time.sleep(100)
note("guardian", server.pid)
while not Path(folder, "go").exists():
    time.sleep(0.02)
if ending != "exit":
    time.sleep(100)
"""
"""A run that has a server of its own, with a folder that goes away with it."""


@pytest.mark.parametrize("ending", ["stop", "server killed", "run of a server stopped"])
def test_all_that_a_server_has_started_ends_with_it(ending: str, start: Starter, tmp_path: Path) -> None:
    """Before the guardian of an inner server is killed, it has cleaned up."""
    folder = folder_with_a_file(tmp_path / "scratch")
    if ending == "run of a server stopped":
        server = start(sys.executable, "-c", PARENT, str(tmp_path), "sleep", *python(FAMILY, tmp_path))
    else:
        server = start(*python(FAMILY, tmp_path), remove=folder)
    pids = family_of(tmp_path)
    assert os.getsid(pids["daemon"]) != os.getsid(pids["server"]) != os.getsid(0)
    if ending == "server killed":
        os.kill(pids["server"], signal.SIGKILL)
        wait_for(lambda: server.how_it_ended() is not None, "the guardian's end")
        assert str(server.how_it_ended()).startswith("has ended (signal 9)")
    else:
        server.stop()
        server.stop()  # does nothing
        assert str(server.how_it_ended()).startswith("was stopped")
    assert not any(map(is_running, [*pids.values(), server.pid]))
    assert not folder.exists()


LEAKER = """
import signal, subprocess, sys, time
from multiprocessing import resource_tracker
folder, name = sys.argv[1:]
open(f"/dev/shm/sem.{name}", "wb").write(bytes(32))
resource_tracker.register(f"/{name}", "semaphore")
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", code], pass_fds=[resource_tracker.getfd()])
open(f"{folder}/up", "w").close()
time.sleep(100)
"""
"""Has a semaphore that its tracker deletes when nobody that knows of it is left, and a child that stays."""


def test_semaphores_go_with_a_server_that_is_killed(start: Starter, tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    server = start(*python(LEAKER, tmp_path, name))
    wait_for(lambda: (tmp_path / "up").exists(), "the server")
    [pid] = [child.pid for child in psutil.Process(server.pid).children()]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.how_it_ended() is not None, "the guardian's end")
    assert not Path(f"/dev/shm/sem.{name}").exists()


def test_a_server_and_its_processes_die_with_its_guardian(start: Starter, tmp_path: Path) -> None:
    """As after `pkill -9 -f vllm`, which finds the guardian and not the engine, which has another title."""
    server = start(*python(FAMILY, tmp_path))
    pids = family_of(tmp_path)
    try:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not is_running(pids["server"]), "the server's end")
        assert "signal 9" in str(server.how_it_ended())
        wait_for(lambda: not is_running(pids["deaf"]), "the end of its process")
    finally:
        os.kill(pids["daemon"], signal.SIGKILL)  # it has left the group


@pytest.mark.parametrize("ending", ["exit", "forked"])
def test_a_server_does_not_survive_its_run(ending: str, tmp_path: Path) -> None:
    """However it ends, and whether or not somebody else still holds its files open."""
    folder = folder_with_a_file(tmp_path / "scratch")
    command = [sys.executable, "-c", PARENT, str(tmp_path), ending, *python(FAMILY, tmp_path)]
    parent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pids = family_of(tmp_path)
        told = ("guardian", "copy") if ending == "forked" else ("guardian",)
        wait_for(lambda: all((tmp_path / name).exists() for name in told), "what the run tells of itself")
        pids["guardian"] = int((tmp_path / "guardian").read_text())
        assert folder.exists()
        (tmp_path / "go").touch()
        if ending != "exit":
            parent.kill()
        parent.wait(WAIT_S)
        wait_for(lambda: not any(map(is_running, pids.values())), "the end of the family")
        assert not folder.exists()
    finally:
        parent.kill()
        if ending == "forked":
            os.kill(int((tmp_path / "copy").read_text()), signal.SIGKILL)


OPENER = """
import mmap, os, sys, time
kept = []
for path in sys.argv[2:]:
    with open(path, "a+b") as file:
        if file.tell() == 0:
            file.write(b"x" * 4096)
            file.flush()
        kept.append(mmap.mmap(file.fileno(), 4096))
for path in (f"/dev/shm/torch_{os.getpid()}_1_0", f"/dev/shm/cuda.shm.0.{os.getpid():x}.1"):
    open(path, "w").close()
with open(f"{sys.argv[1]}/.up", "w") as file:
    file.write(str(os.getpid()))
os.replace(f"{sys.argv[1]}/.up", f"{sys.argv[1]}/up")
time.sleep(100)
"""
"""Maps files in shared memory, makes two as CUDA IPC does, and does not delete them: as engines do that are killed."""


def cuda_ipc_files(folder: Path) -> list[Path]:
    """Of the opener that has come up in `folder`."""
    pid = int((folder / "up").read_text())
    return [Path(f"/dev/shm/torch_{pid}_1_0"), Path(f"/dev/shm/cuda.shm.0.{pid:x}.1")]


RUN_THAT_SHARES = """
import mmap, os, sys, time
from pathlib import Path
from offline_grpo.engine import spawn
folder, own, *command = sys.argv[1:]
with open(own, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
server = spawn.Child(command, env=os.environ, log_path=Path(folder, "server.log"))
time.sleep(100)
"""


@pytest.fixture(scope="module", autouse=True)
def old() -> Iterator[Path]:
    """A file in shared memory, made before all tests here: one of them needs it to be a few seconds old."""
    path = Path("/dev/shm", f"test-{os.getpid()}-old")
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink()


@pytest.mark.parametrize("ending", ["server killed", "run killed"])
def test_shared_memory_of_a_run_goes_with_it(ending: str, old: Path, tmp_path: Path) -> None:
    """The server's, and the run's own once it is no more; not what was there before, or what others use too."""
    shared, server, own = (Path("/dev/shm", f"test-{os.getpid()}-{name}") for name in ("shared", "server", "own"))
    time.sleep(max(0.0, old.stat().st_ctime + 2.5 - time.time()))  # start times are known to a second
    (tmp_path / "theirs").mkdir()
    other = subprocess.Popen(python(OPENER, tmp_path / "theirs", shared))
    command = [
        sys.executable,
        "-c",
        RUN_THAT_SHARES,
        *map(str, (tmp_path, own)),
        *python(OPENER, tmp_path, old, shared, server),
    ]
    run = subprocess.Popen(command)
    stranger = subprocess.Popen([*PYTHON, "-c", ""])
    stranger.wait()
    foreign = Path(f"/dev/shm/torch_{stranger.pid}_1_0")  # of a process that has ended, and was not of this run
    foreign.touch()
    try:
        wait_for(lambda: (tmp_path / "up").exists() and (tmp_path / "theirs" / "up").exists(), "both")
        guardian = psutil.Process(psutil.Process(int((tmp_path / "up").read_text())).ppid())
        slept = guardian.num_ctx_switches().voluntary
        # a look follows each sleep, and two sleeps from now one has begun and ended; other waits count too
        wait_for(lambda: guardian.num_ctx_switches().voluntary >= slept + 5, "a look of the guardian")
        if ending == "run killed":
            run.kill()
        else:
            os.kill(int((tmp_path / "up").read_text()), signal.SIGKILL)
        gone, kept = [server, *cuda_ipc_files(tmp_path)], [old, shared, foreign, *cuda_ipc_files(tmp_path / "theirs")]
        (gone if ending == "run killed" else kept).append(own)
        wait_for(lambda: not any(path.exists() for path in gone), "the end of its shared memory")
        assert all(path.exists() for path in kept)
    finally:
        for process in (run, other):
            process.kill()
            process.wait()
        for path in (shared, server, own, foreign, *cuda_ipc_files(tmp_path), *cuda_ipc_files(tmp_path / "theirs")):
            path.unlink(missing_ok=True)


RUN_THAT_ENDS = """
import atexit, mmap, os, sys
from offline_grpo.engine.spawn import remove_cuda_driver_files
atexit.register(remove_cuda_driver_files)
kept = []
for path in sys.argv[1:]:
    with open(path, "w+b") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
for path in (f"/dev/shm/torch_{os.getpid()}_1_0", f"/dev/shm/cuda.shm.0.{os.getpid():x}.1"):
    open(path, "w").close()
"""


def test_a_run_that_ends_removes_what_the_cuda_driver_leaves() -> None:
    """Its own, and what it still maps of a server that has ended; torch removes its files itself, and other processes
    theirs.
    """
    dead = subprocess.Popen([*PYTHON, "-c", ""])
    dead.wait()
    of_server, unrelated = (Path(f"/dev/shm/cuda.shm.0.{dead.pid:x}.{number}") for number in (1, 2))
    of_another = Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1")
    unrelated.touch()
    run = subprocess.Popen([sys.executable, "-c", RUN_THAT_ENDS, str(of_server), str(of_another)])
    own, torchs = Path(f"/dev/shm/cuda.shm.0.{run.pid:x}.1"), Path(f"/dev/shm/torch_{run.pid}_1_0")
    try:
        assert run.wait(WAIT_S) == 0
        assert not own.exists()
        assert not of_server.exists()
        assert torchs.exists()
        assert unrelated.exists()
        assert of_another.exists()
    finally:
        for path in (own, torchs, of_server, unrelated, of_another):
            path.unlink(missing_ok=True)
