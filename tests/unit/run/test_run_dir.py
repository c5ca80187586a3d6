"""Finding the run to go on with."""

from pathlib import Path

import pytest
from checkpoints import config_of, make_checkpoint, state_of

from offline_grpo.errors import ConfigError
from offline_grpo.run import lock
from offline_grpo.run.run_dir import RunDir, changed_keys, discard_fresh, find_resume_point

CONFIG = {**config_of(lr=1e-3, iterations=10), "resume": None, "seed": 0}


def make_run(path, iteration, config=CONFIG):
    make_checkpoint(path / "checkpoints" / f"iter_{iteration:03d}", state_of(iteration, config=config))
    return RunDir(path)


@pytest.fixture(autouse=True)
def unlocked():
    with lock.released_at_end():
        yield


@pytest.fixture
def fresh(tmp_path):
    path = tmp_path / "outputs" / "2026-01-02" / "12-00-00-000000"
    (path / ".hydra").mkdir(parents=True)
    return RunDir(path)


def found(resume, fresh, config=CONFIG):
    point = find_resume_point(resume, fresh, {**config, "resume": resume})
    return point and (point.run_dir.path.name, point.checkpoint.name)


def test_no_resume_starts_anew(fresh):
    make_run(fresh.path.parent / "11-00-00-000000", 3)
    assert found(None, fresh) is None


def test_auto_takes_the_newest_run_of_the_same_configuration(fresh):
    day = fresh.path.parent
    make_run(fresh.path.parent.parent / "2026-01-01" / "23-00-00-000000", 8)
    assert found("auto", fresh) == ("23-00-00-000000", "iter_008")
    make_run(day / "09-00-00-000000", 5)
    make_run(day / "10-00-00-000000", 3)
    make_run(day / "11-30-00-000000", 3, {**CONFIG, "seed": 1})
    assert found("auto", fresh) == ("10-00-00-000000", "iter_003")
    make_run(day / "11-00-00-000000", 9)  # finished: a command that is repeated trains nothing more
    assert found("auto", fresh) == ("11-00-00-000000", "iter_009")


def test_auto_goes_on_in_a_folder_that_was_named_by_hand(fresh):
    make_run(fresh.path.parent / "11-00-00-000000", 3)
    make_run(fresh.path, 1)
    assert found("auto", fresh) == (fresh.path.name, "iter_001")


def test_auto_without_anything_to_resume_starts_anew(fresh):
    assert found("auto", fresh) is None


def test_auto_takes_no_run_of_another_sweep(tmp_path):
    sweep = tmp_path / "multirun" / "2026-01-02"
    make_run(sweep / "10-00-00-000000" / "0", 2)
    make_run(sweep / "10-00-00-000000" / "1", 4, {**CONFIG, "seed": 1})
    fresh = RunDir(sweep / "12-00-00-000000" / "1")
    fresh.path.mkdir(parents=True)
    assert found("auto", fresh, {**CONFIG, "seed": 1}) is None
    make_run(fresh.path, 2, {**CONFIG, "seed": 1})
    assert found("auto", fresh, {**CONFIG, "seed": 1}) == ("1", "iter_002")


def test_auto_passes_over_damaged_checkpoints(fresh):
    day = fresh.path.parent
    make_run(day / "09-00-00-000000", 5)
    run = make_run(day / "10-00-00-000000", 3)
    (run.checkpoints / "iter_003" / "trainer" / "state.json").write_text("{")
    assert found("auto", fresh) == ("09-00-00-000000", "iter_005")


def test_a_path_may_be_a_run_or_a_checkpoint(fresh):
    run = make_run(fresh.path.parent / "elsewhere", 3)
    make_run(fresh.path.parent / "elsewhere" / "deeper", 1)
    assert found(str(run.path), fresh) == ("elsewhere", "iter_003")
    assert found(str(run.checkpoints / "iter_003"), fresh) == ("elsewhere", "iter_003")


def test_a_path_without_checkpoint_is_refused(fresh, tmp_path):
    with pytest.raises(ConfigError, match=r"resume=.*nothing_here: no checkpoint there; give a run folder"):
        found(str(tmp_path / "nothing_here"), fresh)


def test_changes_are_named_by_key():
    now = {**config_of(lr=1e-4, iterations=10, new=1), "resume": "auto", "seed": 0}
    assert changed_keys(CONFIG, now) == {"train.lr": (1e-3, 1e-4), "train.new": (None, 1)}


def test_only_untouched_folders_are_discarded(fresh):
    discard_fresh(fresh.path)
    assert not fresh.path.exists()
    assert fresh.path.parent.parent.parent.exists()
    used = fresh.path.parent / "used"
    (used / "metrics").mkdir(parents=True)
    discard_fresh(used)
    assert used.exists()


@pytest.mark.parametrize("folder", [".", "run1", "../beside", "../../far/beside"])
def test_the_folder_in_which_a_run_was_started_is_not_discarded(folder, tmp_path, monkeypatch):
    """Nor those above it. `.` is what all processes of a run but the first are told."""
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    Path(folder).mkdir(parents=True, exist_ok=True)
    discard_fresh(Path(folder))
    assert here.is_dir()
    assert folder == "." or not Path(folder).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["above"]


def test_a_secret_is_no_change_and_is_not_shown() -> None:
    """Checkpoints have none, and environment variables may have other ones by then."""
    saved = {"engine": {"api_key": "***"}, "generation": {"base_url": "http://h"}}
    assert changed_keys(saved, {"engine": {"api_key": "sk-314"}, "generation": {"base_url": "http://h"}}) == {}
    assert changed_keys(saved, {"engine": {"api_key": None}, "generation": {"base_url": "http://me:pw@h"}}) == {
        "engine.api_key": ("***", None),
        "generation.base_url": ("http://h", "http://***@h"),
    }
