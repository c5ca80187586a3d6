"""The algorithm in one file."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from statistics import fmean

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"


def test_the_reward_rises(cache: str) -> None:
    """Of a smaller model, which is built in seconds, at a rate that it can learn with in twenty iterations."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    its, small = main.__globals__, {"hidden_size": 64, "intermediate_size": 128, "warm_start_batch_size": 64}
    tiny_model = its["tiny_model"]
    its |= {"LEARNING_RATE": 1e-3, "tiny_model": lambda steps: replace(tiny_model(steps), **small)}
    rewards = main(20, Path(cache.removeprefix("cache_dir=")), warm_start_steps=300)
    assert fmean(rewards[-8:]) > fmean(rewards[:4]) + 0.08
    assert len(EXAMPLE.read_text().splitlines()) <= 200
