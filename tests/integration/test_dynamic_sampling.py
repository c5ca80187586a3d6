"""A run that replaces groups without signal goes on from a checkpoint to the same files, bit for bit."""

from children import SMALL, metrics_of, weights_of
from factories import compose_config

from offline_grpo.run import app


def test_a_resumed_run_replaces_the_same_groups(tmp_path):
    overrides = [
        *SMALL,
        "train.iterations=3",
        "data.resample_zero_signal=true",
        "data.soft_overlong_tokens=3",
        "checkpoint.save_interval=1",
        "checkpoint.keep_last_k=all",
        "eval.enabled=false",
        f"cache_dir={tmp_path}/cache",
    ]
    run_dir = tmp_path / "run"
    app.run(compose_config(*overrides), run_dir)
    before, weights = metrics_of(run_dir), weights_of(run_dir)
    assert sum(metrics["num_groups_replaced"] for metrics in before.values()) > 0
    assert any(metrics["reward/overlong"] < 0 for metrics in before.values())
    assert all(metrics["num_updates"] == 2 for metrics in before.values())
    app.run(compose_config(*overrides, f"resume={run_dir}/checkpoints/iter_000"), tmp_path / "again")
    assert (run_dir / "set_aside").exists()
    assert metrics_of(run_dir) == before
    assert weights_of(run_dir) == weights
