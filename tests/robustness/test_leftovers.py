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
from engines import forking_python, preloaded_python, processes_naming, save_model, writers
from runs import five, own_server, wait_until

ROOT = Path(__file__).parents[2]
UNFINISHED = ("*.unfinished", ".writing_*", ".tiny-*", "*.tmp", ".lock")


def unfinished(folder: Path) -> list[Path]:
    return [path for pattern in UNFINISHED for path in folder.rglob(pattern)]


# Beside a server


def first_forking(folder: Path) -> str:
    """`forking_python` for the first server of a run, `preloaded_python` for those after it."""
    script = folder / "first_forking"
    first, others = (f'exec {python(folder)} "$@"\n' for python in (forking_python, preloaded_python))
    script.write_text(f"#!/bin/sh\nmkdir {folder}/first 2> /dev/null && {first}{others}")
    script.chmod(0o755)
    return str(script)


def start(folder: Path, python: str, *overrides: str) -> subprocess.Popen[bytes]:
    """A run as a user starts it, with a temporary folder of its own. `python`: that of the server."""
    (folder / "tmp").mkdir()
    paths = os.pathsep.join(str(ROOT / "tests" / name) for name in ("fakes", "robustness"))
    command = [
        sys.executable,
        str(ROOT / "run_grpo.py"),
        f"hydra.run.dir={folder / 'run'}",
        *five(save_model(folder / "model")),
    ]
    command += [*own_server(python), "checkpoint.enabled=true", "checkpoint.save_interval=1", *overrides]
    with (folder / "out.txt").open("wb") as output:
        env = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def server_of(folder: Path) -> psutil.Process:
    """The server itself, below its guardian."""
    [port] = re.findall(r"--port (\d+)", (folder / "run" / "server_0.log").read_text().splitlines()[0])
    [server] = [
        p
        for pid in processes_naming(f"--port {port}")
        if "offline-grpo-guardian" not in " ".join((p := psutil.Process(pid)).cmdline())
    ]
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
    process = start(tmp_path, first_forking(tmp_path), "train.iterations=500", *loggers)
    try:
        wait_until((tmp_path / "run" / "metrics" / "train_iter_000.json").exists, 400, printed)
        server = server_of(tmp_path)
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
    process = start(tmp_path, forking_python(tmp_path), "train.iterations=500")
    try:
        wait_until((tmp_path / "run" / "metrics" / "train_iter_000.json").exists, 400, (tmp_path / "out.txt").read_text)
        server = server_of(tmp_path)
        everything = [server.pid, *(p.pid for p in server.children(recursive=True))]
        assert len(everything) > 1
        for pid in (process.pid, server.ppid()):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, everything)), 30)


def files_with(key: str, folder: Path) -> list[str]:
    """Configuration, logs, checkpoints, bridge file, W&B, TensorBoard, and what was printed."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
