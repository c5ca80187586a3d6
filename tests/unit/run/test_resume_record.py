"""Whether a run that shall go on is finished, and what is suggested then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, state_of
from factories import compose_config

from offline_grpo.run import resume_record
from offline_grpo.run.config import as_plain, typed
from offline_grpo.run.run_dir import ResumePoint, RunDir
from offline_grpo.settings import RunConfig
from offline_grpo.train.milestones import Watch
from offline_grpo.train.schedule import LrSchedule

REACHED = Watch("pass@1", best=0.9, best_iteration=1, last=0.9)
NO_BETTER = Watch("pass@1", best=0.5, best_iteration=0, last=0.5, num_since_best=3)
BOTH = Watch("pass@1", best=0.9, best_iteration=0, last=0.9, num_since_best=3)


def point_of(path: Path, iteration: int, **state: Any) -> ResumePoint:
    return ResumePoint(
        RunDir(path), path / "checkpoints" / f"iter_{iteration:03d}", state_of(iteration, config=config_of(), **state)
    )


def config_with(*words: str) -> RunConfig:
    return typed(compose_config("train.iterations=10", *words))


def is_finished(point: ResumePoint, *words: str) -> bool:
    return resume_record.is_finished(point, as_plain(compose_config("train.iterations=10", *words)))


def suggested(point: ResumePoint, config: RunConfig) -> list[str]:
    line = resume_record.describe_finished(point, config)
    words = line.partition("longer: ")[2].partition("; anew")[0].split()
    return [word for word in words if word.startswith("train.")]


@pytest.mark.parametrize(
    ("iteration", "watch", "words"),
    [
        (1, REACHED, ["train.stop_when.threshold=null"]),
        (1, NO_BETTER, ["train.stop_when.patience=null"]),
        (1, BOTH, ["train.stop_when.threshold=null", "train.stop_when.patience=null"]),
        (9, REACHED, ["train.stop_when.threshold=null", "train.iterations=20"]),
        (9, None, ["train.iterations=20"]),
    ],
)
def test_a_finished_run_does_what_is_suggested(
    iteration: int, watch: Watch | None, words: list[str], tmp_path: Path
) -> None:
    stop_when = ("train.stop_when.threshold=0.8", "train.stop_when.patience=2")
    point = point_of(tmp_path, iteration, milestones={} if watch is None else {"stop_when": watch})
    assert is_finished(point, *stop_when)
    assert suggested(point, config_with(*stop_when)) == words
    assert not is_finished(point, *stop_when, *words)
    for i in range(len(words)):
        assert is_finished(point, *stop_when, *words[:i], *words[i + 1 :]), "no word too many"


def test_a_learning_rate_is_suggested_only_where_it_has_ended(tmp_path: Path) -> None:
    ended = LrSchedule(kind="linear", num_updates=10, warmup_steps=0)
    config = config_with("train.lr=1e-5", "train.stop_when.threshold=0.8")
    assert suggested(point_of(tmp_path, 9, lr_schedule=ended), config) == ["train.iterations=20", "train.lr=1e-05"]
    early = point_of(tmp_path, 1, lr_schedule=ended, milestones={"stop_when": REACHED})
    assert suggested(early, config) == ["train.stop_when.threshold=null"]


def test_a_run_whose_last_evaluation_was_cut_short_is_not_finished(tmp_path: Path) -> None:
    point = point_of(tmp_path, 9)
    point.run_dir.metrics.mkdir()
    (point.run_dir.metrics / "train_iter_009.json").touch()
    assert not is_finished(point, "eval.enabled=false", "train.iterations=11")
