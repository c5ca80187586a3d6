"""Whole runs that learn from a teacher."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from factories import compose_config
from runs import SMALL, alone_and_together, metrics_of, weights_of

from offline_grpo.run import train

pytestmark = pytest.mark.slow
WORDS = (*SMALL, "train.iterations=3", "eval.enabled=false", "checkpoint.save_interval=1", "train.schedule=constant")


@pytest.fixture(scope="module")
def teacher(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("teacher") / "run"
    train(compose_config(cache, *WORDS, "train.lr=0.01"), run)
    return run / "checkpoints" / "iter_002"


@pytest.fixture
def words(cache: str, teacher: Path) -> tuple[str, ...]:
    return (cache, *WORDS, "train/advantage=distill", f"train.advantage.teacher={teacher}", "train.kl_coef=0")


def test_a_run_is_resumed_and_replayed_to_the_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    whole, halves, replayed = tmp_path / "whole", tmp_path / "halves", tmp_path / "replayed"
    train(compose_config(*words), whole)
    train(compose_config(*words, "train.iterations=2"), halves)
    train(compose_config(*words, f"resume={halves}"), tmp_path / "fresh")
    assert weights_of(halves) == weights_of(whole)
    assert metrics_of(halves) == metrics_of(whole)
    said = pq.read_table(whole / "rollouts" / "iter_000.parquet")["teacher_logprobs"]
    assert said.null_count == 0
    replay = ("rollouts=replay", f"rollouts.path={whole}", "train.advantage.teacher=null")
    train(compose_config(*words, *replay), replayed)
    assert weights_of(replayed) == weights_of(whole)


def test_two_processes_with_a_part_each_learn_what_one_does(words: tuple[str, ...], tmp_path: Path) -> None:
    alone, _ = alone_and_together(tmp_path, *words, "train.sharding=fsdp2", "model/lora=default")
    assert metrics_of(alone)["train_iter_000.json"]["distill/reverse_kl"] > 1e-3
