"""Who may write to a folder. The other process of these tests is another open file: the kernel does not tell the two
apart.
"""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from offline_grpo.errors import ConfigError
from offline_grpo.run import lock


@pytest.fixture(autouse=True)
def unlocked():
    with lock.released_at_end():
        yield


def another(folder: Path, **record: object) -> int:
    """The lock of another process on a folder; closing this descriptor ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").write_text(json.dumps(record))
    descriptor = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_folder_in_use_is_refused_in_one_line_that_says_by_whom(tmp_path):
    descriptor = another(tmp_path / "run", pid=4711, host=os.uname().nodename, since="2026-01-31 12:00:00")
    (tmp_path / "run" / "metrics").mkdir()
    (tmp_path / "run" / "metrics" / "train_iter_000.json").touch()
    with pytest.raises(ConfigError) as error:
        lock.take(tmp_path / "run", "hydra.run.dir=run")
    assert str(error.value) == (
        f"hydra.run.dir=run: process 4711 writes to {tmp_path}/run (since 2026-01-31 12:00:00, iterations recorded: 1); stop it with "
        "`kill -INT 4711`, or start in another folder"
    )
    os.close(descriptor)
    lock.take(tmp_path / "run", "hydra.run.dir=run")


def test_a_process_on_another_host_is_named_with_it(tmp_path):
    another(tmp_path / "sweep", pid=4711, host="node7")
    (tmp_path / "sweep" / "0" / ".hydra").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"process 4711 on node7 writes to .*, runs begun: 1\); stop it on node7 with `kill"
    ):
        lock.take(tmp_path / "sweep", "hydra.sweep.dir=sweep")


@pytest.mark.parametrize("begun", ["", '{"pid": 47'])
@pytest.mark.parametrize("look", [lock.take, lock.refuse_another])
def test_a_process_that_is_refused_waits_for_the_record_of_the_owner(look, begun, tmp_path, monkeypatch):
    another(tmp_path)
    record = tmp_path / ".lock"
    record.write_text(begun)
    monkeypatch.setattr(lock, "WAIT_S", -1)
    monkeypatch.setattr(time, "sleep", lambda _: record.write_text(json.dumps({"pid": 4711, "like": "this"})))
    with pytest.raises(ConfigError, match=r"^key: process 4711 writes to"):
        look(tmp_path, "key", "this")


def test_it_does_not_wait_long_for_a_record_that_does_not_come(tmp_path, monkeypatch):
    another(tmp_path)
    (tmp_path / ".lock").write_text("")
    monkeypatch.setattr(lock, "WAIT_S", -1)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^key: process \? writes to"):
        lock.take(tmp_path, "key")
    assert lock.RECORD_S <= time.monotonic() - began < 5


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 1}', "\0" * 5000])
def test_what_a_dead_process_left_is_no_hindrance_and_goes_away(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    assert lock.owner(tmp_path) is None
    lock.take(tmp_path, "key")
    lock.take(tmp_path, "key")
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    lock.release(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_owner_deletes_at_the_last_moment_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    another(tmp_path)
    real = lock._wait_for
    monkeypatch.setattr(lock, "_wait_for", lambda *args: ((tmp_path / ".lock").unlink(), monkeypatch.undo(), True)[2])
    lock.take(tmp_path, "key")
    assert lock._wait_for is real
    assert not is_free(os.open(tmp_path / ".lock", os.O_RDWR))


def test_the_lock_does_not_outlive_the_run_in_processes_that_it_started(tmp_path):
    lock.take(tmp_path, "key")
    witness = os.open(tmp_path / ".lock", os.O_RDWR)
    assert not is_free(witness)
    server = subprocess.Popen(["sleep", "60"], close_fds=False)
    worker = os.fork()
    if worker == 0:
        signal.pause()
    try:
        lock.release(tmp_path)
        deadline = time.monotonic() + 10  # for the fork to get that far
        while not is_free(witness):
            assert time.monotonic() < deadline
    finally:
        server.kill()
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def no_locks(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING):
        lock.take(tmp_path, "key")
        lock.take(tmp_path, "key")
    assert caplog.messages == [
        f"{tmp_path}: its file system has no locks (No locks available); nothing would notice a second run in this folder"
    ]
    with lock.choosing(tmp_path):
        assert lock.owner(tmp_path / "other") is None


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"^hydra.run.dir=x: .*/file/run cannot be made or written \(Not a directory\); choose"
    ):
        lock.take(tmp_path / "file" / "run", "hydra.run.dir=x")


def test_the_first_two_of_a_root_choose_one_after_the_other(tmp_path):
    """Which neither has made yet."""
    root, inside, others = tmp_path / "multirun", threading.Event(), []

    def choose():
        inside.set()
        with lock.choosing(root):
            others.append(time.monotonic())

    with lock.choosing(root):
        second = threading.Thread(target=choose)
        second.start()
        inside.wait()
        time.sleep(0.2)
        left = time.monotonic()
    second.join()
    assert others[0] > left


def test_only_the_same_configuration_is_refused_for_being_run_elsewhere(tmp_path):
    like = lock.likeness({"train": {"lr": 1e-3}, "seed": 0})
    another(tmp_path / "1", pid=4711, like=like)
    another(tmp_path / "2", pid=4712, like=lock.likeness({"seed": 1}))
    (tmp_path / "3").mkdir()
    with pytest.raises(ConfigError, match=r"^resume=auto: process 4711 writes .*"):
        lock.refuse_another(tmp_path / "1", "resume=auto", lock.likeness({"seed": 0, "train": {"lr": 1e-3}}))
    for name in ("2", "3"):
        lock.refuse_another(tmp_path / name, "resume=auto", like)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"job": {"chdir": True}}, "hydra.job.chdir=true: paths are relative to where a run is started"),
        ({"output_subdir": None}, "hydra.output_subdir=null: a resume reads the configuration in .hydra"),
        ({"output_subdir": "conf"}, "hydra.output_subdir=conf: "),
    ],
)
@pytest.mark.parametrize("mode", ["run", "multirun"])
def test_places_in_which_nothing_is_found_again_are_refused(changed, message, mode, tmp_path, capsys):
    settings = {
        "run": {"dir": str(tmp_path / "run")},
        "sweep": {"dir": str(tmp_path / "sweep")},
        "job": {"chdir": None},
    }
    settings |= {"output_subdir": ".hydra", "overrides": {"task": [], "hydra": []}, **changed}
    config = OmegaConf.create({"resume": None, "hydra": settings})
    with pytest.raises(SystemExit, match="2"):
        getattr(lock.FolderLock(), f"on_{mode}_start")(config)
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())
