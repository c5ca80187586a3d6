"""The learning rate of a run that is resumed with other settings, and what is suggested when it is finished."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import compose_config
from run_folders import state_of

from offline_grpo.config.compose import as_plain, fresh_schedule, typed
from offline_grpo.errors import ConfigError
from offline_grpo.history.folder import RunDir
from offline_grpo.history.resume import ResumePoint, checked, describe_finished, is_finished
from offline_grpo.train.schedule import LrSchedule, UpdateCounters, Watch

RUN = ("train.iterations=6", "train.updates_per_iteration=4", "data.problems_per_iteration=8")


def stopped(folder: Path, *overrides: str, num_updates: int = 12, schedule: LrSchedule | None = None) -> ResumePoint:
    """After three iterations with these settings."""
    cfg = compose_config(*overrides)
    counters = UpdateCounters(num_updates=num_updates)
    state = state_of(2, config=as_plain(cfg), lr_schedule=schedule or fresh_schedule(typed(cfg)), counters=counters)
    return ResumePoint(RunDir(folder), folder / "checkpoints" / "iter_002", state)


def schedule_of(point: ResumePoint, *overrides: str, keys: tuple[str, ...] = ()) -> LrSchedule:
    """With these settings, of which `keys` were typed now."""
    cfg = compose_config(*overrides)
    found = checked(point, typed(cfg), as_plain(cfg), keys).lr_schedule
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("change", "num_left"),
    [
        ("train.updates_per_iteration=1", 3),
        ("train.epochs=2", 24),
        ("data.rollouts_per_problem=2 data.problems_per_iteration=1", 6),
    ],
)
def test_another_number_of_updates_ends_where_the_run_ends(change: str, num_left: int, tmp_path: Path) -> None:
    found = schedule_of(stopped(tmp_path, *RUN), *RUN, *change.split())
    assert found(12) == pytest.approx(0.5)
    assert found(12 + num_left - 1) == pytest.approx(0.5 / num_left)
    assert found(12 + num_left) == 0


def test_what_goes_on_after_that_is_the_same(tmp_path: Path) -> None:
    other = (*RUN, "train.updates_per_iteration=1")
    first = schedule_of(stopped(tmp_path, *RUN), *other)
    assert schedule_of(stopped(tmp_path, *other, num_updates=13, schedule=first), *other) == first
    longer = schedule_of(stopped(tmp_path, *other, num_updates=13, schedule=first), *other, "train.iterations=10")
    assert longer.num_updates == first.num_updates + 4


def test_a_schedule_that_has_ended_is_not_continued(tmp_path: Path) -> None:
    """Neither at 0 nor at the little that was left of it where some iterations made no update."""
    over = (*RUN, "train.iterations=3")
    for num_updates in (12, 11):
        ended = stopped(tmp_path, *over, num_updates=num_updates)
        with pytest.raises(
            ConfigError, match=r"^train.iterations=6: the linear schedule .* ended .* such as train.lr="
        ):
            schedule_of(ended, *RUN, keys=("train.iterations",))
        same = schedule_of(ended, *RUN, keys=("train.lr",))
        assert (same(num_updates), same.first, same.num_updates) == (1.0, num_updates, 24)
        constant = schedule_of(ended, *RUN, "train.schedule=constant")
        assert constant(num_updates) == constant(24) == 1.0
    steady = stopped(tmp_path, *over, "train.schedule=constant")
    assert schedule_of(steady, *RUN, "train.schedule=constant")(24) == 1.0


def test_another_learning_rate_begins_anew_at_its_peak(tmp_path: Path) -> None:
    under_way = stopped(tmp_path, *RUN)
    found = schedule_of(under_way, *RUN, "train.lr=1e-4")
    assert (found(12), found(24)) == (1.0, 0.0)
    warm = schedule_of(under_way, *RUN, "train.lr=1e-4", "train.warmup_steps=4")
    assert [warm(update) for update in (12, 15)] == [0.25, 1.0]


def test_a_command_that_a_scheduler_repeats_does_not_restart_the_schedule(tmp_path: Path) -> None:
    under_way = stopped(tmp_path, *RUN)
    assert schedule_of(under_way, *RUN, keys=("train.lr", "train.warmup_steps")) == under_way.state.lr_schedule


@pytest.mark.parametrize(
    ("iteration", "has_reached", "words"),
    [
        (1, True, ["train.stop_when.threshold=null"]),
        (9, True, ["train.stop_when.threshold=null", "train.iterations=20", "train.lr=0.0003"]),
        (9, False, ["train.iterations=20", "train.lr=0.0003"]),
    ],
)
def test_a_finished_run_does_what_is_suggested(
    iteration: int, has_reached: bool, words: list[str], tmp_path: Path
) -> None:
    watches = {"stop_when": Watch("pass@1", best=0.9, best_iteration=1, last=0.9)} if has_reached else {}
    overrides = ("train.iterations=10", "train.stop_when.threshold=0.8")
    cfg = compose_config(*overrides)
    state = state_of(iteration, config=as_plain(cfg), lr_schedule=fresh_schedule(typed(cfg)), milestones=watches)
    run = RunDir(tmp_path)
    point = ResumePoint(run, tmp_path / "checkpoints" / f"iter_{iteration:03d}", state)
    assert is_finished(run, state, as_plain(cfg))
    suggested = describe_finished(point, typed(cfg)).partition("longer: ")[2].partition("; anew")[0].split()
    assert [word for word in suggested if word.startswith("train.")] == words
    assert not is_finished(run, state, as_plain(compose_config(*overrides, *words)))


def test_a_run_whose_last_evaluation_was_cut_short_is_not_finished(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), as_plain(compose_config("train.iterations=10"))
    run.metrics.mkdir()
    (run.metrics / "train_iter_009.json").touch()
    assert not is_finished(run, state_of(9, config=config), config)
