"""Whatever ends a run, nothing is left: processes, shared memory, temporary files, unfinished files, copies of the
server's key.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engines import preloaded_python, processes_naming, save_model, serve_and_wait, writers
from runs import child_process, five, own_server, wait_until

ROOT = Path(__file__).parents[2]
UNFINISHED = ("*.unfinished", ".writing_*", ".tiny-*", "*.tmp", ".lock")


def unfinished(folder: Path) -> list[Path]:
    return [path for pattern in UNFINISHED for path in folder.rglob(pattern)]


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """A run as a user starts it, beside a server, with a temporary folder of its own."""
    (folder / "tmp").mkdir()
    command = [sys.executable, str(ROOT / "run_grpo.py"), f"hydra.run.dir={folder / 'run'}"]
    command += [*five(save_model(folder / "model")), *own_server(preloaded_python(folder))]
    command += ["checkpoint.enabled=true", "checkpoint.save_interval=1", *overrides]
    with (folder / "out.txt").open("wb") as output:
        env = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT / "tests" / "fakes")}
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def server_of(log: Path) -> psutil.Process:
    """The server with this log itself, below its guardian."""
    [port] = re.findall(r"--port (\d+)", log.read_text().splitlines()[0])
    found = map(psutil.Process, processes_naming(f"--port {port}"))
    [server] = [process for process in found if "offline-grpo-guardian" not in process.cmdline()]
    return server


def num_recoveries(run: Path) -> float:
    """Of its last iteration."""
    return json.loads(max((run / "metrics").glob("train_iter_*.json")).read_text())["sync/num_recoveries"]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.slow
def test_nothing_is_left(tmp_path: Path) -> None:
    """After a Ctrl-C, and before it the death of the server, in whose place the run starts another one.

    After a SIGKILL: tests/integration/test_server_deaths.py.
    """
    before, printed = shared_memory(), (tmp_path / "out.txt").read_text
    loggers = ("+logger=[tensorboard,wandb]", "logger.wandb.mode=offline")
    process = start(tmp_path, "train.iterations=500", *loggers)
    try:
        wait_until((tmp_path / "run" / "metrics" / "train_iter_000.json").exists, 400, printed)
        server = server_of(tmp_path / "run" / "server_0.log")
        environment = server.environ()
        key, scratch = environment["OFFLINE_GRPO_API_KEY"], environment["TMPDIR"]
        found = {*server.children(recursive=True), *writers(tmp_path / "run" / "server_0.log")}
        everything = [server.pid, *(p.pid for p in found), process.pid]
        assert not processes_naming(key)
        assert list(Path(scratch).iterdir()), "the sockets of the server"
        server.kill()
        wait_until(lambda: num_recoveries(tmp_path / "run") == 1, 400, printed)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130, printed()
    finally:
        process.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, everything)) and not processes_naming(str(tmp_path)), 60, printed)
    wait_until(lambda: not [n for n in shared_memory() - before if f"-{process.pid}-" in n], 60, printed)
    assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor_")] == []
    assert unfinished(tmp_path) == []
    assert files_with(key, tmp_path) == []
    for path in (tmp_path / "run").glob("server_*.log"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_no_engine_is_left_where_run_and_guardian_are_killed_at_once(tmp_path: Path) -> None:
    """As after `pkill -9 python`, which does not find the engine: that has a title of its own."""
    process = child_process(serve_and_wait, tmp_path)
    process.start()
    try:
        wait_until(lambda: (tmp_path / "up").exists() or not process.is_alive(), 400)
        server = server_of(tmp_path / "server_0.log")
        everything = [server.pid, *(p.pid for p in server.children(recursive=True))]
        assert len(everything) > 1
        for pid in (process.pid, server.ppid()):
            os.kill(pid, signal.SIGKILL)
        process.join(60)
    finally:
        process.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, everything)), 30)


def files_with(key: str, folder: Path) -> list[str]:
    """Configuration, logs, checkpoints, bridge file, W&B, TensorBoard, and what was printed."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
