"""The algorithm in one file."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import fmean

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"


def test_the_reward_rises(cache: str) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    rewards = main(6, Path(cache.removeprefix("cache_dir=")), warm_start_steps=500)
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.1
    assert len(EXAMPLE.read_text().splitlines()) <= 200
