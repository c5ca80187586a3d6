"""Runs that train on what another run has recorded."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from factories import compose_config
from runs import SMALL, metrics_of, weights_of

from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.run import train

WORDS = (*SMALL, "train.iterations=3", "eval.interval=1", "checkpoint.save_interval=1", "checkpoint.keep_last_k=all")


@pytest.fixture(scope="module")
def live(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("live") / "run"
    train(compose_config(cache, *WORDS), run)
    return run


def replay(live: Path, run: Path, cache: str, *words: str) -> Path:
    train(compose_config(cache, *WORDS, "rollouts=replay", f"rollouts.path={live}", *words), run)
    return run


def without_epoch(run: Path) -> dict[str, dict[str, float]]:
    found = metrics_of(run)
    return {file: {key: each[key] for key in each if key != "rollouts/epoch"} for file, each in found.items()}


def test_training_live_and_replaying_it_give_the_same_weights_metrics_and_record(live, cache, tmp_path):
    run = replay(live, tmp_path / "run", cache)
    assert weights_of(run) == weights_of(live)
    assert without_epoch(run) == metrics_of(live)
    names = {path.name for path in (live / "rollouts").iterdir()}
    assert len(names) == 7
    for name in names:
        assert pq.read_table(run / "rollouts" / name) == pq.read_table(live / "rollouts" / name)


def test_a_replay_samples_nothing_and_is_resumed_to_the_bit(live, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(TransformersClient, "generate", lambda *_: pytest.fail("asked the engine"))
    words = ("eval.enabled=false", "rollouts.problems_per_iteration=3", "rollouts.shuffle=true")
    words += ("train.schedule=constant",)
    whole = replay(live, tmp_path / "whole", cache, *words)
    halves = replay(live, tmp_path / "halves", cache, *words, "train.iterations=2")
    replay(live, tmp_path / "fresh", cache, *words, f"resume={halves}")
    assert weights_of(halves) == weights_of(whole)
    assert weights_of(whole)["iter_002"] != weights_of(live)["iter_002"]
    assert metrics_of(halves) == metrics_of(whole)
    assert metrics_of(whole)["train_iter_002.json"]["rollouts/epoch"] == 0.75


def test_a_setting_that_a_replay_does_not_read_is_refused(live: Path, cache: str, tmp_path: Path) -> None:
    setting = "data.rollouts_per_problem=4"
    words = (cache, *WORDS, "rollouts=replay", f"rollouts.path={live}", setting)
    with pytest.raises(ConfigError, match=f"^{setting}: this source does not read it"):
        train(compose_config(*words), tmp_path / "run", overrides=[setting])
