"""Runs of the tiny mixture of experts, whose updates follow recorded routes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from factories import compose_config
from runs import SMALL, Kill, alone_and_together, metrics_of, printed, run_in_child, weights_of

from offline_grpo.errors import ConfigError
from offline_grpo.model import load
from offline_grpo.run import train

EXPERTS = (
    *(*SMALL, "model=tiny_moe", "model.tiny.intermediate_size=16", "model.tiny.num_experts=4", "train.lr=0.01"),
    "train.iterations=3",
)
DIFFER = "routes/differ_frac"


@pytest.fixture(scope="module")
def alone(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("routed") / "run"
    assert run_in_child(run, *EXPERTS, cache) == 0, printed(run)
    return run


def test_the_first_update_differs_in_nothing_and_later_ones_do(cache: str, tmp_path: Path, alone: Path) -> None:
    """Its weights are those that chose."""
    metrics = metrics_of(alone)["train_iter_000.json"]
    blocks = [metrics[f"routes/block_{number:02d}/differ_frac"] for number in range(2)]
    assert 0 < metrics[DIFFER] < 0.5
    assert metrics[DIFFER] == pytest.approx(sum(blocks) / 2)
    frozen = tmp_path / "frozen"
    train(compose_config(cache, *EXPERTS, "train.iterations=1", "train.lr=1e-30"), frozen)
    assert metrics_of(frozen)["train_iter_000.json"][DIFFER] == 0


def test_routes_matter(cache: str, tmp_path: Path, alone: Path) -> None:
    other = tmp_path / "other"
    train(compose_config(cache, *EXPERTS, "model.router_replay=none"), other)
    found, expected = metrics_of(other), metrics_of(alone)
    assert DIFFER not in found["train_iter_000.json"]
    assert found["train_iter_000.json"]["reward_mean"] == expected["train_iter_000.json"]["reward_mean"]
    assert weights_of(other) != weights_of(alone)


def test_a_dense_model_is_refused_before_its_weights_are_read(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_policy", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"^model.router_replay=old: model.train_id=.* has no experts, by its config"):
        train(compose_config(cache, *SMALL, "model.router_replay=old", "train.updates_per_iteration=2"), tmp_path / "a")


def test_blocks_that_are_computed_again_change_nothing(cache: str, tmp_path: Path, alone: Path) -> None:
    again = tmp_path / "again"
    train(compose_config(cache, *EXPERTS, "train.gradient_checkpointing=true"), again)
    assert metrics_of(again) == metrics_of(alone)
    assert weights_of(again) == weights_of(alone)


def test_a_killed_run_goes_on_bit_for_bit_and_its_record_can_be_replayed(
    cache: str, tmp_path: Path, alone: Path
) -> None:
    killed = tmp_path / "killed"
    before = Kill("offline_grpo.checkpoint.checkpointer:Checkpointer.commit", 2)
    run_in_child(killed, *EXPERTS, cache, kill=before)
    assert "train_iter_002.json" not in {path.name for path in (killed / "checkpoints").iterdir()}
    assert run_in_child(killed, *EXPERTS, cache, f"resume={killed}") == 0, printed(killed)
    assert metrics_of(killed) == metrics_of(alone)
    assert weights_of(killed) == weights_of(alone)
    replayed = tmp_path / "replayed"
    train(compose_config(cache, *EXPERTS, "rollouts=replay", f"rollouts.path={alone}"), replayed)
    assert weights_of(replayed) == weights_of(alone)
    shutil.rmtree(replayed)


@pytest.mark.parametrize("sharding", ["none", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_processes_follow_the_trajectory_of_one(cache: str, tmp_path: Path, sharding: str) -> None:
    overrides = (*EXPERTS, cache, "train.epochs=2", "data.problems_per_iteration=5")
    alone, together = alone_and_together(tmp_path, *overrides, together=(f"train.sharding={sharding}",))
    for name, metrics in metrics_of(alone).items():
        assert metrics_of(together)[name].get(DIFFER) == pytest.approx(metrics.get(DIFFER), abs=1e-3)
