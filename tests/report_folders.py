"""Folders of runs as runs leave them, made in no time: metrics, settings and a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from factories import make_completion

from offline_grpo.disk import utf8
from offline_grpo.rollouts.rows import parquet, table_of
from offline_grpo.types import Problem, Rollout, RolloutGroup, Score

HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;b&gt; \udc80 \x00 \u202e ' + "x" * 1_000_000
)


def make_run(
    folder: Path,
    *,
    iterations: int = 12,
    solved: int = 3,
    seed: int = 0,
    loss: str = "grpo",
    text: str = "four",
    **metrics: float,
) -> Path:
    """A run of which `solved` of four held-out problems are solved at the end; the model writes `text`."""
    (folder / "metrics").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    for index in range(iterations):
        train = {"reward_mean": index / iterations, "entropy": 0.5, "clip_frac": 0.0}
        train |= {"time/generate_s": 2.0, "time/train_s": 1.0, "time/iteration_s": 3.0}
        _write(folder / "metrics" / f"train_iter_{index:03d}.json", train | metrics)
        _store(folder, "train", index, [_group(text, index, [(1.0, True), (0.0, False)])], [[0.7, -0.7]])
    for name, share in (("init", 0.0), (f"iter_{iterations - 1:03d}", solved / 4)):
        interval = {"pass@1_low": share - 0.01, "pass@1_high": share + 0.01}
        _write(folder / "metrics" / f"eval_{name}.json", {"pass@1": share} | interval)
    _store(folder, "eval", iterations - 1, [_group(text, i, [(1.0, i < solved)]) for i in range(4)], None)
    make_settings(folder, iterations=iterations, seed=seed, loss=loss)
    return folder


def make_settings(folder: Path, *, iterations: int, seed: int, loss: str) -> None:
    """What Hydra stores about a run."""
    train = {"iterations": iterations, "lr": 1e-3, "loss": {"_target_": loss}}
    config = {"train": train, "seed": seed, "model": {"train_id": None}, "logger": {"api_key": "secret-key"}}
    choices = {"task": "arithmetic", "model": "tiny", "train/loss": loss, "hydra/launcher": "basic"}
    files: dict[str, Any] = {
        "config": config,
        "hydra": {"hydra": {"runtime": {"choices": choices}}},
        "overrides": [f"seed={seed}", f"train/loss={loss}"],
    }
    (folder / ".hydra").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / ".hydra" / f"{name}.yaml").write_text(yaml.safe_dump(content))


def _group(text: str, number: int, scores: list[tuple[float, bool]]) -> RolloutGroup:
    problem = Problem(f"{text[:200]} {number}", ({"role": "user", "content": f"2+2= {utf8(text)}"},), "4")
    rollouts = [
        Rollout.of_one_turn(
            (1, 2), make_completion((3,)), temperature=1.0, text=f"{text} {number}", score=Score(reward, is_correct, {})
        )
        for reward, is_correct in scores
    ]
    return RolloutGroup(problem, tuple(rollouts))


def _store(
    folder: Path, phase: str, iteration: int, groups: list[RolloutGroup], advantages: list[list[float]] | None
) -> None:
    name = f"{'eval_' if phase == 'eval' else ''}iter_{iteration:03d}.parquet"
    (folder / "rollouts" / name).write_bytes(parquet(table_of(phase, groups, advantages, iteration), {}))


def _write(path: Path, metrics: dict[str, float]) -> None:
    path.write_text(json.dumps(metrics))
