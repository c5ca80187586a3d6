"""The algorithm learns, in one file and in the product's own loop: plain GRPO of a tiny model."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from factories import compose_config

from offline_grpo.run import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"
SMALLER = {"hidden_size": 64, "intermediate_size": 128, "warm_start_batch_size": 64}
STEPS = 300


@pytest.mark.slow
def test_the_reward_rises(cache: str) -> None:
    """Of a smaller model, which is built in seconds, at a rate that it can learn with in twelve iterations, each on the
    first 16 problems. With three seeds the reward rises by 0.39 to 0.48.
    """
    main = runpy.run_path(str(EXAMPLE))["main"]
    its = main.__globals__
    tiny_model = its["tiny_model"]
    its |= {"LEARNING_RATE": 1e-3, "tiny_model": lambda steps: replace(tiny_model(steps), **SMALLER)}
    its["len"] = lambda _: 16  # of all problems
    rewards = main(12, Path(cache.removeprefix("cache_dir=")), warm_start_steps=STEPS)
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.2
    assert len(EXAMPLE.read_text().splitlines()) <= 200


def test_the_products_loop_learns(cache: str, tmp_path: Path) -> None:
    """The same model on as many problems, with the settings of a default run but for their sizes. With six seeds the
    reward rises by 0.25 to 0.31.
    """
    model = (f"model.tiny.{name}={value}" for name, value in {**SMALLER, "warm_start_steps": STEPS}.items())
    words = ("data.num_train_seeds=16", "data.problems_per_iteration=16", "train.iterations=12", "train.lr=1e-3")
    short = ("eval.enabled=false", "checkpoint.enabled=false", "num_threads=1", "model.device=cpu")
    train(compose_config(cache, *model, *words, *short), tmp_path / "run")
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "run" / "metrics").glob("train_*"))]
    rewards = [record["reward_mean"] for record in records]
    assert len(rewards) == 12
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.12
