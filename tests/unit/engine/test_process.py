"""A server's process ends with the run that started it, however that ends, and takes along all that it started. No vLLM
here.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from offline_grpo.engine import process as process_module
from offline_grpo.engine.process import GUARDIAN, ServerProcess, last_line, last_lines
from offline_grpo.errors import EngineDied, EngineError

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

Starter = Callable[..., ServerProcess]


def is_alive(server: ServerProcess) -> bool:
    try:
        server.check_alive()
    except EngineDied:
        return False
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts a command in `tmp_path`, and stops it after the test."""
    started: list[ServerProcess] = []

    def start(
        *command: str, name: str = "server", remove: Path | None = None, env: Mapping[str, str] | None = None
    ) -> ServerProcess:
        env = os.environ if env is None else env
        started.append(ServerProcess(command, env=env, log_path=tmp_path / "logs" / f"{name}.log", remove=remove))
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


RUN_WITH_A_SERVER = """
import pathlib, os, sys, time
from offline_grpo.engine.process import ServerProcess
folder = pathlib.Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], str(folder)]
server = ServerProcess(command, env=os.environ, log_path=folder / "inner.log", remove=folder / "gone")
time.sleep(100)
"""
"""A run that has a server of its own, with a folder that goes away with it."""


# What it says


def test_log_has_the_command_line_and_all_output(start: Starter, tmp_path: Path) -> None:
    server = start(*python("import sys; print('out', flush=True); print('err', file=sys.stderr)", "two words"))
    wait_for(lambda: not is_alive(server), "the end")
    command, *output = server.log_path.read_text().splitlines()
    assert command.startswith(f"$ {sys.executable} -I -S -c ")
    assert command.endswith(" 'two words'")
    assert output == ["out", "err"]
    assert server.log_path == tmp_path / "logs" / "server.log"


def test_a_key_in_the_command_line_is_not_logged(start: Starter) -> None:
    server = start(*python("pass"), "--api-key", "hush-hush", "--port", "1")
    assert "hush-hush" not in server.log_path.read_text()
    assert server.log_path.read_text().splitlines()[0].endswith("--api-key ... --port 1")


def test_the_environment_is_the_given_one_and_names_the_guardian(start: Starter) -> None:
    server = start("/usr/bin/env", env={"ONE": "1"})
    wait_for(lambda: not is_alive(server), "the end")
    lines = [line for line in server.log_path.read_text().splitlines() if not line.startswith(("$", "LC_CTYPE"))]
    assert sorted(lines) == [f"OFFLINE_GRPO_GUARDIAN={server.pid}", "ONE=1"]


def test_ready(start: Starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "PROGRESS_INTERVAL_S", 0.0)
    server = start(*python("import time; print('loading', 'weights', flush=True); time.sleep(100)"))
    wait_for(lambda: last_line(server.log_path) == "loading weights", "output")
    answers = iter([False, False, True])
    with caplog.at_level("INFO"):
        server.wait_until(lambda: next(answers), timeout_s=60, what="the stand-in")
    assert is_alive(server)
    assert len(caplog.messages) == 2
    assert all(
        re.fullmatch(r"waiting for the stand-in: \d+ s; loading weights", message) for message in caplog.messages
    )


def test_not_ready_in_time(start: Starter) -> None:
    server = start(*python("import time; print('compiling', flush=True); time.sleep(100)"))
    wait_for(lambda: last_line(server.log_path) == "compiling", "output")
    with pytest.raises(
        EngineError,
        match=r"^the stand-in was not ready after 0\.6 s \(engine\.start_timeout_s\); .*compiling.*server\.log$",
    ) as error:
        server.wait_until(lambda: False, timeout_s=0.6, what="the stand-in")
    assert not isinstance(error.value, EngineDied)
    assert not is_alive(server)


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("os.kill(os.getpid(), 15)", "signal 15"),
    ],
)
def test_death_tells_why(ending: str, why: str, start: Starter, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    lines = ["INFO 1", "ValueError: no room for the KV cache", "INFO 2", "INFO 3", "INFO 4"]
    script.write_text(f"import os, sys\nprint(*{lines}, sep=chr(10), flush=True)\n{ending}\n")
    server = start(*PYTHON, str(script))
    with pytest.raises(EngineDied) as error:
        server.wait_until(lambda: False, timeout_s=60, what="the stand-in")
    message = f"the server has ended ({why}); its last words: ValueError: no room for the KV cache. The whole log: {server.log_path}"
    assert str(error.value) == message
    with pytest.raises(EngineDied, match="no room"):  # and again, whenever asked
        server.check_alive()


def test_nothing_is_told_of_a_server_that_lives(start: Starter) -> None:
    start(*python("import time; time.sleep(100)")).check_alive()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it printed nothing."),
        ("\n \n", "it printed nothing."),
        ("a\nb\nc\nd\n", "its last words: c | d."),
        ("KeyError: 0\nIOError: 1\n at\n(pid=7) torch.OutOfMemoryError: 2\nbye", "its last words: IOError: 1 | torch.OutOfMemoryError: 2."),
        ("ValueError: twice\nmore\nValueError: twice\nbye", "its last words: ValueError: twice."),
        ("x: error: unrecognized arguments: --foo\nbye\n", "its last words: error: unrecognized arguments: --foo."),
        ("ValueError: 1\nEngineDeadError: an issue. See stack trace (above) for it.\nbye", "its last words: ValueError: 1."),
        ("a\nEngineDeadError: 1. See stack trace.\nbye", "its last words: EngineDeadError: 1. See stack trace."),
        (" WARNING this may raise ValueError: 1\nbye", "its last words: WARNING this may raise ValueError: 1 | bye."),
        ("y" * 500, f"its last words: {'y' * 300}."),
    ],
)  # fmt: skip
def test_last_words(log: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(log)
    assert last_lines(path) == words


def test_last_words_of_a_long_log_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"ValueError: long ago\n" + b"\xff" * 2_000_000 + b"\nthe end\n")
    assert last_line(path) == "the end"
    assert "long ago" not in last_lines(path)


def test_last_words_name_the_cause_before_many_requests_that_failed_by_it(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "RuntimeError: the cause\n" + "EngineDeadError: See stack trace (above) for the root cause.\n" * 8000
    )
    assert last_lines(path) == "its last words: RuntimeError: the cause."


def test_a_command_that_does_not_exist(start: Starter, tmp_path: Path) -> None:
    folder = folder_with_a_file(tmp_path / "scratch")
    server = start("/no/such/python", "-m", "server", remove=folder)
    with pytest.raises(EngineDied, match=r"exit code 127.*cannot start /no/such/python: .*No such file or directory"):
        server.wait_until(lambda: False, timeout_s=60, what="the stand-in")
    assert not folder.exists()


# How it ends


def test_stop_ends_all_that_the_server_started(start: Starter, tmp_path: Path) -> None:
    folder = folder_with_a_file(tmp_path / "scratch")
    server = start(*python(FAMILY, tmp_path), remove=folder)
    pids = family_of(tmp_path)
    assert os.getsid(pids["daemon"]) != os.getsid(pids["server"]) != os.getsid(0)
    server.stop()
    assert not any(map(is_running, [*pids.values(), server.pid]))
    assert not folder.exists()
    server.stop()  # does nothing


def test_a_server_may_end_in_its_own_way(start: Starter, tmp_path: Path) -> None:
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('saved', flush=True), sys.exit()))\n"
    code += "print('up', flush=True)\ntime.sleep(100)"
    server = start(*python(code))
    wait_for(lambda: last_line(server.log_path) == "up", "the server")
    server.stop()
    assert last_line(server.log_path) == "saved"


def test_a_server_that_ignores_sigterm_is_killed(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = tmp_path / "guardian.py"
    impatient.write_text(GUARDIAN.read_text().replace("KILL_AFTER_S = 10.0", "KILL_AFTER_S = 0.3"))
    assert "KILL_AFTER_S = 0.3" in impatient.read_text()
    monkeypatch.setattr(process_module, "GUARDIAN", impatient)
    server = start(
        *python("import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(100)")
    )
    wait_for(lambda: last_line(server.log_path) == "deaf", "the server")
    server.stop()
    with pytest.raises(EngineDied, match="signal 9"):
        server.check_alive()


SLOW_DEATH = """
import threading
poll, kill = subprocess.Popen.poll, os.kill

def slow_poll(self):
    code = poll(self)
    time.sleep(0.4)
    return code

subprocess.Popen.poll = slow_poll
os.kill = lambda pid, number: threading.Timer(0.1, kill, (pid, number)).start()
"""
"""Signals arrive a moment after they are sent: every process dies after the guardian has looked at it and before it
acts on that.
"""


def test_the_exit_code_is_the_servers_whenever_it_dies(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "guardian.py"
    text = GUARDIAN.read_text().replace("KILL_AFTER_S = 10.0", "KILL_AFTER_S = 0.3")
    slow.write_text(text.replace('if __name__ == "__main__":', f'{SLOW_DEATH}\nif __name__ == "__main__":'))
    assert SLOW_DEATH in slow.read_text()
    monkeypatch.setattr(process_module, "GUARDIAN", slow)
    server = start(
        *python("import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(100)")
    )
    wait_for(lambda: last_line(server.log_path) == "deaf", "the server")
    server.stop()
    with pytest.raises(EngineDied, match="signal 9"):
        server.check_alive()


def test_what_a_server_leaves_behind_when_it_dies_is_ended(start: Starter, tmp_path: Path) -> None:
    folder = folder_with_a_file(tmp_path / "scratch")
    server = start(*python(FAMILY, tmp_path), remove=folder)
    pids = family_of(tmp_path)
    os.kill(pids["server"], signal.SIGKILL)
    wait_for(lambda: not is_alive(server), "the guardian's end")
    assert not any(map(is_running, pids.values()))
    assert not folder.exists()


HALF_ENDED = """
import ctypes, os, socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(100,)).start()
    with open(f"{sys.argv[1]}/.port", "w") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(f"{sys.argv[1]}/.port", f"{sys.argv[1]}/port")
    ctypes.CDLL(None).pthread_exit(None)
time.sleep(100)
"""
"""A server whose child has the port too, and one thread that goes on after the first one has ended: it counts as a
zombie.
"""


def test_a_server_has_ended_when_its_port_is_free(start: Starter, tmp_path: Path) -> None:
    server = start(*python(HALF_ENDED, tmp_path))
    wait_for(lambda: (tmp_path / "port").exists(), "the port")
    [pid] = [child.pid for child in psutil.Process(server.pid).children()]
    [child] = psutil.Process(pid).children()
    wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE, "the end of its first thread")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(server), "the guardian's end")
    assert not psutil.pid_exists(child.pid)
    socket.create_server(("127.0.0.1", int((tmp_path / "port").read_text()))).close()


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


@pytest.mark.parametrize("ending", ["stop", "killed"])
def test_semaphores_go_with_a_server(ending: str, start: Starter, tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    server = start(*python(LEAKER, tmp_path, name))
    wait_for(lambda: (tmp_path / "up").exists(), "the server")
    if ending == "killed":
        [pid] = [child.pid for child in psutil.Process(server.pid).children()]
        os.kill(pid, signal.SIGKILL)
    else:
        server.stop()
    wait_for(lambda: not is_alive(server), "the guardian's end")
    assert not Path(f"/dev/shm/sem.{name}").exists()


def test_a_server_and_its_processes_die_with_its_guardian(start: Starter, tmp_path: Path) -> None:
    """As after `pkill -9 -f vllm`, which finds the guardian by its command and not the engine, which has another title."""
    server = start(*python(FAMILY, tmp_path))
    pids = family_of(tmp_path)
    try:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not is_running(pids["server"]), "the server's end")
        with pytest.raises(EngineDied, match="signal 9"):
            server.check_alive()
        wait_for(lambda: not is_running(pids["deaf"]), "the end of its process")
    finally:
        os.kill(pids["daemon"], signal.SIGKILL)  # it has left the group


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_is_for_the_run_and_not_for_the_server(number: signal.Signals, start: Starter) -> None:
    server = start(*python("print('up', flush=True)\nimport time; time.sleep(100)"))
    wait_for(lambda: last_line(server.log_path) == "up", "the server")
    assert os.getpgid(server.pid) != os.getpgid(0)
    os.kill(server.pid, number)
    time.sleep(0.3)
    server.check_alive()


PARENT = """
import os, sys, time
from pathlib import Path
from offline_grpo.engine.process import ServerProcess
folder, ending, *command = sys.argv[1:]
server = ServerProcess(command, env=os.environ, log_path=Path(folder, "server.log"), remove=Path(folder, "scratch"))
def note(name, pid):
    Path(folder, f".{name}").write_text(str(pid))
    os.replace(Path(folder, f".{name}"), Path(folder, name))
if ending == "forked" and os.fork() == 0:  # a copy of this process that holds the pipe too, and goes on
    note("copy", os.getpid())
    time.sleep(100)
note("guardian", server.pid)
while not Path(folder, "go").exists():
    time.sleep(0.02)
if ending == "error":
    raise SystemExit(1)
if ending != "exit":
    time.sleep(100)
"""


@pytest.mark.parametrize("ending", ["exit", "error", "killed", "terminated", "forked"])
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
        if ending in ("killed", "forked", "terminated"):
            parent.send_signal(signal.SIGTERM if ending == "terminated" else signal.SIGKILL)
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
from offline_grpo.engine import process
folder, own, *command = sys.argv[1:]
with open(own, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
server = process.ServerProcess(command, env=os.environ, log_path=Path(folder, "server.log"))
while not Path(folder, "stop").exists():
    time.sleep(0.02)
server.stop()
time.sleep(100)
"""


@pytest.fixture(scope="module", autouse=True)
def old() -> Iterator[Path]:
    """A file in shared memory, made before all tests here: one of them needs it to be a few seconds old."""
    path = Path("/dev/shm", f"test-{os.getpid()}-old")
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink()


@pytest.mark.parametrize("ending", ["stop", "server killed", "run killed"])
def test_shared_memory_of_a_run_goes_with_it(ending: str, old: Path, tmp_path: Path) -> None:
    """The server's, and the run's own once the run is no more; not what was there before, and not what others use too."""
    shared, server, own = (Path("/dev/shm", f"test-{os.getpid()}-{name}") for name in ("shared", "server", "own"))
    time.sleep(
        max(0.0, old.stat().st_ctime + 2.5 - time.time())
    )  # start times are known to a second, and taken a second early
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
        # it looks whenever it has slept, and two sleeps from now it has begun and ended a look; other waits of its own
        # count too
        wait_for(lambda: guardian.num_ctx_switches().voluntary >= slept + 5, "a look of the guardian")
        if ending == "run killed":
            run.kill()
        elif ending == "server killed":
            os.kill(int((tmp_path / "up").read_text()), signal.SIGKILL)
        else:
            (tmp_path / "stop").touch()
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
from offline_grpo.engine.guardian import remove_cuda_driver_files
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


def test_two_servers_do_not_meet(start: Starter, tmp_path: Path) -> None:
    homes = [folder_with_a_file(tmp_path / name) for name in ("first", "second")]
    first, second = (start(*python(FAMILY, home), name=home.name, remove=home / "scratch") for home in homes)
    families = [family_of(home) for home in homes]
    for home in homes:
        folder_with_a_file(home / "scratch")
    first.stop()
    assert not any(map(is_running, families[0].values()))
    assert not (homes[0] / "scratch").exists()
    assert all(map(is_running, families[1].values()))
    assert (homes[1] / "scratch" / "weights").exists()
    second.check_alive()
    second.stop()
    assert not any(map(is_running, families[1].values()))


def test_processes_of_others_survive(start: Starter, tmp_path: Path) -> None:
    """Even one with the very same command line."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    command = python(FAMILY, theirs)
    foreign = subprocess.Popen(command, start_new_session=True)
    pids = family_of(theirs)
    try:
        for name in MEMBERS:
            (theirs / name).unlink()
        server = start(*command)
        family_of(theirs)
        server.stop()
        assert all(map(is_running, pids.values()))
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        foreign.wait(WAIT_S)


def test_what_the_servers_of_a_run_leave_is_cleaned_up_before_their_guardians_are_killed(
    start: Starter, tmp_path: Path
) -> None:
    gone = folder_with_a_file(tmp_path / "gone")
    run = start(sys.executable, "-c", RUN_WITH_A_SERVER, str(tmp_path), FAMILY)
    family = family_of(tmp_path)
    run.stop()
    assert not any(map(is_running, family.values()))
    assert not gone.exists()
