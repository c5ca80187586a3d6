"""The run to resume, its folder, and the lock on it."""

import fcntl
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from run_folders import config_of, make_checkpoint, state_of

from offline_grpo.errors import ConfigError
from offline_grpo.history.folder import Lock, RunDir, discard_fresh
from offline_grpo.history.resume import changed_keys, find_resume_point

CONFIG = {**config_of(lr=1e-3, iterations=10), "resume": None, "seed": 0}


def make_run(path, iteration, config=CONFIG):
    make_checkpoint(path / "checkpoints" / f"iter_{iteration:03d}", state_of(iteration, config=config))
    return RunDir(path)


@pytest.fixture
def fresh(tmp_path):
    path = tmp_path / "outputs" / "2026-01-02" / "12-00-00-000000"
    (path / ".hydra").mkdir(parents=True)
    return RunDir(path)


def found(resume, fresh, config=CONFIG):
    with ExitStack() as locks:
        point = find_resume_point(resume, fresh, {**config, "resume": resume}, locks)
        return point and (point.run_dir.path.name, point.checkpoint.name)


def test_auto_takes_the_newest_run_of_the_same_configuration(fresh):
    day = fresh.path.parent
    assert found("auto", fresh) is None
    make_run(fresh.path.parent.parent / "2026-01-01" / "23-00-00-000000", 8)
    assert found("auto", fresh) == ("23-00-00-000000", "iter_008")
    make_run(day / "09-00-00-000000", 5)
    make_run(day / "10-00-00-000000", 3)
    make_run(day / "11-30-00-000000", 3, {**CONFIG, "seed": 1})
    branch = day / "10-30-00-000000"  # the first iterations of another configuration
    make_run(branch, 4)
    (branch / ".hydra").mkdir()
    (branch / ".hydra" / "starts.yaml").write_text("- changes: {train.lr: [0.1, 0.2]}\n- changes: {}\n")
    assert found("auto", fresh) == ("10-00-00-000000", "iter_003")
    make_run(day / "11-00-00-000000", 9)  # finished: a command that is repeated trains nothing more
    assert found("auto", fresh) == ("11-00-00-000000", "iter_009")
    (day / "11-00-00-000000" / "checkpoints" / "iter_009" / "trainer" / "state.json").write_text("{")
    assert found("auto", fresh) == ("10-00-00-000000", "iter_003"), "a damaged one is skipped"


def test_auto_in_a_folder_with_a_checkpoint_stays_there(fresh, tmp_path):
    make_run(fresh.path.parent / "11-00-00-000000", 3)
    make_run(fresh.path, 1)
    assert found("auto", fresh) == (fresh.path.name, "iter_001")
    job = RunDir(tmp_path / "multirun" / "2026-01-02" / "12-00-00-000000" / "1")
    make_run(job.path.parents[1] / "10-00-00-000000" / "1", 4)
    assert found("auto", job) is None, "no run of another sweep"


def test_a_path_may_be_a_run_or_a_checkpoint(fresh):
    run = make_run(fresh.path.parent / "elsewhere", 3)
    make_run(run.path, 7)
    assert found(None, fresh) is None
    for path in (run.path, run.checkpoints / "iter_007"):
        assert found(str(path), fresh) == ("elsewhere", "iter_007")
    assert found(str(run.checkpoints / "iter_003"), fresh) == (fresh.path.name, "iter_003"), "a new run"


def test_a_new_run_does_not_mix_with_another(fresh):
    """One that was killed before its first checkpoint begins again; files of others are not touched."""
    fresh.metrics.mkdir()
    for name in ("train_iter_000.json", "eval_init.json", "mine.json"):
        (fresh.metrics / name).touch()
    with pytest.raises(ConfigError, match=r"^hydra.run.dir=.*: this folder has a run; continue it with resume=auto"):
        found(None, fresh)
    descriptor = another(fresh.path)
    with pytest.raises(ConfigError, match="process 4711 on node7 is using"):
        found("auto", fresh)
    assert len(list(fresh.metrics.iterdir())) == 3, "nothing is deleted without the lock"
    os.close(descriptor)
    assert found("auto", fresh) is None
    fresh.discard_after(-2)
    assert [path.name for path in fresh.metrics.iterdir()] == ["mine.json"]


def test_changes_are_named_by_key(tmp_path, monkeypatch):
    now = {**config_of(lr=1e-4, iterations=10, new=1), "resume": "auto", "seed": 0}
    assert changed_keys(CONFIG, now) == {"train.lr": (1e-3, 1e-4), "train.new": (None, 1)}
    saved = {"engine": {"api_key": "***"}, "task": {"path": "rows.jsonl"}}
    assert changed_keys(saved, {"engine": {"api_key": "sk-314"}, "task": {"path": "rows.jsonl"}}) == {}, "a secret"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    assert changed_keys(saved, {**saved, "task": {"path": str(tmp_path / "rows.jsonl")}}) == {}, "the same file"


def test_only_untouched_folders_are_discarded(tmp_path, monkeypatch):
    """Nor the one in which a run was started."""
    monkeypatch.chdir(tmp_path)
    for name in ("used/metrics", "fresh/.hydra", ".hydra"):
        Path(name).mkdir(parents=True)
    for name in ("used", "fresh", "."):
        discard_fresh(Path(name))
    assert {path.name for path in tmp_path.iterdir()} == {"used", ".hydra"}


# The lock. The other process of these tests is another open file: the kernel does not tell the two apart.


def another(folder: Path) -> int:
    """The lock of another process on a folder; closing this descriptor ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").write_text("4711 on node7")
    descriptor = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(tmp_path, fresh):
    descriptor = another(tmp_path / "run")
    message = r"=run: process 4711 on node7 is using .*/run; stop it with `kill -INT 4711`, or start in another folder"
    with pytest.raises(ConfigError, match=f"^hydra.run.dir{message}"):
        Lock(tmp_path / "run", "hydra.run.dir=run")
    discard_fresh(tmp_path / "run")
    assert (tmp_path / "run").exists(), "another process has just begun there"
    make_run(tmp_path / "run", 3)
    with pytest.raises(ConfigError, match=r"^resume=.*: process 4711 on node7 is using"):
        found(str(tmp_path / "run"), fresh)
    os.close(descriptor)
    lock = Lock(tmp_path / "run", "hydra.run.dir=run")
    assert (tmp_path / "run" / ".lock").read_text().startswith(f"{os.getpid()} on ")
    lock.release()
    assert not (tmp_path / "run" / ".lock").exists()


def test_the_lock_does_not_outlive_the_run_in_processes_that_it_started(tmp_path):
    lock = Lock(tmp_path, "key")
    witness = os.open(tmp_path / ".lock", os.O_RDWR)
    assert not is_free(witness)
    server = subprocess.Popen(["sleep", "60"], close_fds=False)
    worker = os.fork()
    if worker == 0:
        signal.pause()
    try:
        lock.release()
        deadline = time.monotonic() + 10  # for the fork to get that far
        while not is_free(witness):
            assert time.monotonic() < deadline
    finally:
        server.kill()
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
