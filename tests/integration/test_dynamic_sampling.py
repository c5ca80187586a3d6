"""Runs that replace groups without signal: they go on from a checkpoint to the same files, bit for bit, and make all
their updates.
"""

import pytest
from factories import compose_config
from runs import SMALL, metrics_of, weights_of

from offline_grpo.run import train
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Score


@pytest.mark.slow
def test_a_resumed_run_replaces_the_same_groups(tmp_path):
    sampling = ("data.resample_zero_signal=true", "data.soft_overlong_tokens=3", "eval.enabled=false")
    saved = ("train.iterations=3", "checkpoint.save_interval=1", "checkpoint.keep_last_k=all")
    overrides = [*SMALL, *sampling, *saved, f"cache_dir={tmp_path}/cache"]
    run_dir = tmp_path / "run"
    train(compose_config(*overrides), run_dir)
    before, weights = metrics_of(run_dir), weights_of(run_dir)
    assert sum(metrics["num_groups_replaced"] for metrics in before.values()) > 0
    assert any(metrics["reward/overlong"] < 0 for metrics in before.values())
    assert all(metrics["num_updates"] == 2 for metrics in before.values())
    again = tmp_path / "again"
    train(compose_config(*overrides, f"resume={run_dir}/checkpoints/iter_000"), again)
    assert metrics_of(again) == metrics_of(run_dir) == before
    assert weights_of(again).items() <= weights.items()


@pytest.mark.slow
def test_where_no_group_ever_has_signal_all_updates_are_made_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(Arithmetic, "score", lambda *_: Score(0.0, False, {}))
    words = ("train.iterations=2", "data.resample_zero_signal=true", "train.drop_zero_signal_groups=true")
    overrides = [*SMALL, *words, "eval.enabled=false", f"cache_dir={tmp_path}/cache"]
    train(compose_config(*overrides), tmp_path / "run")
    for metrics in metrics_of(tmp_path / "run").values():
        assert metrics["num_groups_zero_signal"] == metrics["num_groups"] == 4
        assert metrics["num_groups_replaced"] == 12
        assert metrics["num_updates"] == 2
        assert metrics["loss_pg"] == 0
