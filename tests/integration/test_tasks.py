"""Whole runs of other tasks than sums: instructions, and mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest
from factories import compose_config, make_qwen2
from runs import SMALL, metrics_of, weights_of

from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.run import train
from offline_grpo.task.ifeval import follows

BRIEF = (
    *("num_threads=1", "train.iterations=2", "data.problems_per_iteration=4", "data.rollouts_per_problem=4"),
    *("data.num_train_seeds=null", "train.drop_zero_signal_groups=false", "generation.max_new_tokens=12"),
    *("eval.num_ids=4", "eval.replicates=2", "eval.ks=[1,2]", "eval.interval=1"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The words for a random model that writes any character."""
    folder = tmp_path_factory.mktemp("model")
    make_qwen2(vocab_size=100, max_position_embeddings=1024).save_pretrained(folder)
    build_char_tokenizer(1024).save_pretrained(str(folder))
    return f"model.train_id={folder}"


def followed(rows: list[dict]) -> dict[str, float]:
    """The share of the instructions of each kind that the recorded texts follow."""
    found: dict[str, list[float]] = {}
    for row in rows:
        own: dict[str, list[bool]] = {}
        for kind, arguments in json.loads(row["answer"]):
            own.setdefault(kind, []).append(follows(row["text"], kind, arguments))
        for kind, each in own.items():
            found.setdefault(f"measured/instruction/{kind.replace(':', '/')}", []).append(fmean(each))
    return {name: fmean(values) for name, values in found.items()}


@pytest.mark.slow
def test_a_run_of_ifeval_and_its_replay_measure_every_kind_of_instruction(model: str, tmp_path: Path) -> None:
    words = (*BRIEF, "model=hf", model, "task=ifeval_sample", "train.lr=1e-3")
    train(compose_config(*words), tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")
    seen: set[float] = set()
    for name, phase in (("iter_000", "train"), ("iter_001", "train"), ("eval_init", "eval"), ("eval_iter_001", "eval")):
        expected = followed(pq.read_table(tmp_path / "run" / "rollouts" / f"{name}.parquet").to_pylist())
        found = metrics[f"{phase}_{name.removeprefix('eval_')}.json"]
        assert {key: value for key, value in found.items() if key.startswith("measured/")} == pytest.approx(expected)
        seen |= set(expected.values())
    assert min(seen) == 0
    assert max(seen) == 1
    assert metrics["train_iter_001.json"]["num_updates"] == 1
    train(compose_config(*words, "rollouts=replay", f"rollouts.path={tmp_path / 'run'}"), tmp_path / "replay")
    again = metrics_of(tmp_path / "replay")
    assert {name: {k: v for k, v in own.items() if k != "rollouts/epoch"} for name, own in again.items()} == metrics
    assert weights_of(tmp_path / "replay") == weights_of(tmp_path / "run")


@pytest.mark.slow
def test_a_mixture_is_resumed_to_the_bit(cache: str, tmp_path: Path) -> None:
    small = [word for word in SMALL if not word.startswith("task.")]
    weights = [f"task.tasks.{name}.format_weight=0.5" for name in ("addition", "subtraction")]
    words = (*small, *weights, cache, "experiment=mixture", "train.schedule=constant", "checkpoint.keep_last_k=all")
    train(compose_config(*words), tmp_path / "whole")
    train(compose_config(*words, "train.iterations=2"), tmp_path / "halves")
    train(compose_config(*words, f"resume={tmp_path / 'halves'}"), tmp_path / "fresh")
    assert metrics_of(tmp_path / "halves") == metrics_of(tmp_path / "whole")
    assert weights_of(tmp_path / "halves") == weights_of(tmp_path / "whole")
    tables = [pq.read_table(file) for file in sorted((tmp_path / "halves" / "rollouts").glob("iter_*.parquet"))]
    ids = [each for table in tables for each in table["problem_id"].to_pylist()]
    assert fmean(each.startswith("addition::") for each in ids) == pytest.approx(0.75, abs=0.2)
    evaluations = [own for name, own in metrics_of(tmp_path / "halves").items() if name.startswith("eval")]
    assert all("task/subtraction/pass@1" in own for own in evaluations)
