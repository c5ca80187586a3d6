"""Runs that train on the routes of a vLLM server. On GPUs vLLM tells them; for the CPU see routed_vllm.py."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from engines import preloaded_python
from factories import compose_config
from routed_vllm import VARIABLE
from runs import (
    SMALL,
    Kill,
    metrics_of,
    own_server,
    printed,
    run_in_child,
    run_in_children,
    weights_of,
)
from worlds import write_sums

from offline_grpo.run import train

pytestmark = pytest.mark.slow  # starts of servers, and warm starts

DIFFER = "routes/differ_frac"
ROUTED = (
    *(*SMALL, "model=tiny_moe", "model.tiny.hidden_size=128", "model.tiny.intermediate_size=16"),
    *("model.tiny.num_experts=8", "train.iterations=3", "train.lr=0.001", "weight_sync=reload"),
    *("model.router_replay=rollout", "+engine.args.enable_prefix_caching=false", f'+engine.env.{VARIABLE}="1"'),
)


@pytest.fixture(scope="module")
def live(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    train(compose_config(cache, *own_server(preloaded_python(folder)), *ROUTED), folder / "run")
    return folder / "run"


def test_the_trainer_follows_the_server(live: Path) -> None:
    for number in range(3):
        metrics = metrics_of(live)[f"train_iter_{number:03d}.json"]
        assert metrics["alignment/diff_abs_mean"] < 1e-5
        assert metrics[DIFFER] < 0.2


def test_they_are_on_record_but_for_the_last_token(live: Path) -> None:
    rows: list[Any] = pq.read_table(live / "rollouts" / "iter_000.parquet").to_pylist()
    for row in rows:
        routes = np.load(BytesIO(row["routes"]))
        assert routes.dtype == np.uint8
        assert routes.shape == (len(row["prompt_ids"]) + len(row["completion_ids"]), 2, 2)
        assert routes[:-1].max() < 8
        assert (routes[:-1, :, 0] != routes[:-1, :, 1]).all()
        assert (routes[-1] == 255).all()


def test_a_replay_of_the_record_is_the_run_alone_together_and_resumed(cache: str, live: Path, tmp_path: Path) -> None:
    words = [word for word in ROUTED if not word.startswith(("+engine", "weight_sync"))]
    words += [cache, "eval.enabled=false", "rollouts=replay", f"rollouts.path={live}", "checkpoint.save_interval=1"]
    again, together, killed = (tmp_path / name for name in ("again", "together", "killed"))
    train(compose_config(*words), again)
    last = "iter_002"
    assert weights_of(again)[last] == weights_of(live)[last]
    found, expected = (metrics_of(run)["train_iter_002.json"] for run in (again, live))
    assert found[DIFFER] == expected[DIFFER]
    assert run_in_children(2, together, *words, "train.sharding=fsdp2") == [0, 0], printed(together)
    for name, metrics in metrics_of(again).items():
        assert metrics_of(together)[name] == pytest.approx(metrics, abs=2e-5, rel=1e-4), name
    run_in_child(killed, *words, kill=Kill("offline_grpo.checkpoint.checkpointer:Checkpointer.commit", 2))
    assert last not in weights_of(killed)
    assert run_in_child(killed, *words, f"resume={killed}") == 0, printed(killed)
    assert weights_of(killed)[last] == weights_of(live)[last]


def test_episodes_that_fork_are_routed_while_weights_are_pushed(cache: str, tmp_path: Path) -> None:
    """Asynchronously: a push comes amid requests, and what was drawn before it keeps the routes of older weights."""
    write_sums(tmp_path / "sums.jsonl", 100, 20)
    words = [word for word in ROUTED if not word.startswith(("task.", "data.num_train_seeds"))]
    words += [
        "task=agent",
        "task.agent=worlds:forks",
        f"task.path={tmp_path / 'sums.jsonl'}",
        "mode=async",
        "rollouts.max_staleness=2",
    ]
    words += ["task.max_environment_tokens=40", "task.max_turn_tokens=6", "generation.max_new_tokens=18"]
    words += ["task.correct_threshold=0.99", "eval.enabled=false", "train.iterations=4", "checkpoint.keep_best=null"]
    train(compose_config(cache, *own_server(preloaded_python(tmp_path)), *words), tmp_path / "run")
    metrics = [metrics_of(tmp_path / "run")[f"train_iter_{number:03d}.json"] for number in range(4)]
    assert metrics[0]["alignment/diff_abs_mean"] < 1e-5
    assert max(found["async/age_max"] for found in metrics) > 0
    assert metrics[0]["measured/sequences"] > 2
    for number in range(4):
        for row in pq.read_table(tmp_path / "run" / "rollouts" / f"iter_{number:03d}.parquet").to_pylist():
            routes = np.load(BytesIO(row["routes"]))
            first = len(row["prompt_ids"])
            starts = [first + start for start in row["sequence_starts"] or ()]
            ends = [start - 1 for start in [*starts, len(routes)]]
            assert (np.flatnonzero(routes[:, 0, 0] == 255) == ends).all(), "the last token of each sequence alone"


@pytest.mark.parametrize("replay", ["old", "rollout"])
def test_a_mixture_of_experts_learns(replay: str, cache: str, tmp_path: Path) -> None:
    """The tiny one, in process and beside a server. The warm start that it comes with would take a minute."""
    words = ["model=tiny_moe", f"model.router_replay={replay}", "train.iterations=10", "eval.interval=10", cache]
    words += ["model.tiny.warm_start_steps=400"]
    if replay == "rollout":
        words += [*own_server(preloaded_python(tmp_path)), *ROUTED[-3:], "weight_sync=reload"]
    train(compose_config(*words, "num_threads=1", "checkpoint.enabled=false"), tmp_path / "run")
    before, after = (metrics_of(tmp_path / "run")[name] for name in ("eval_init.json", "eval_iter_009.json"))
    assert after["pass@1_low"] > before["pass@1_high"] + 0.1
