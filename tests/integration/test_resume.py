"""A run that dies anywhere and is resumed ends with the files of a run that did not die."""

import json
import signal
from functools import partial

import pytest
from children import SMALL, Kill, Mishaps, metrics_of, printed, run_in_child, weights_of

SMALL = (*SMALL, Mishaps.override)
STEP, SCORE = "torch.optim:AdamW.step", "offline_grpo.task.arithmetic:Arithmetic.score"
KILLS = {
    "building the model": Kill("offline_grpo.model.tiny:TinyModel.prepare", 1),
    "evaluating before training": ("eval", -1),
    "before sampling": ("generate", 2),
    "after sampling": ("train", 3),
    "between updates": Kill(STEP, 6),
    "after the updates": ("sync", 3),
    "syncing": Kill("offline_grpo.weight_sync.in_process:InProcess.apply", 4),
    "evaluating": ("eval", 3),
    "writing the first checkpoint": Kill("offline_grpo.run.app:torch.save", 1, "after"),
    "writing the second checkpoint": Kill("offline_grpo.run.app:torch.save", 2, "after"),
    "between metrics": Kill("offline_grpo.logger.json_logger:JsonLogger.log", 4),
    "before the checkpoint counts": Kill("offline_grpo.checkpoint.checkpointer:PendingCheckpoint.commit", 1),
    "after the checkpoint counts": Kill("offline_grpo.checkpoint.checkpointer:PendingCheckpoint.commit", 1, "after"),
    "drawing the report": Kill("matplotlib.figure:Figure.savefig", 1),
}
"""A call that is not made any more, or the beginning of an iteration's phase."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """An override: where the runs of this file find the tiny model, once the first of them has built it."""
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "outputs" / "2026-01-01" / "00-00-00-000000"
    assert run_in_child(run_dir, cache, *SMALL, draws=True) == 0, printed(run_dir)
    return run_dir


def assert_same_files(run_dir, expected):
    assert metrics_of(run_dir) == metrics_of(expected)
    assert weights_of(run_dir) == weights_of(expected)
    assert len(weights_of(run_dir)) == 2
    assert (run_dir / "report.png").exists()


def test_a_run_leaves_its_record(uninterrupted):
    assert (uninterrupted / "report.png").stat().st_size > 10_000
    names = set(metrics_of(uninterrupted))
    assert names == {f"train_iter_{i:03d}.json" for i in range(4)} | {"eval_init.json", "eval_iter_001.json", "eval_iter_003.json"}
    assert {path.name for path in uninterrupted.iterdir()} == {"metrics", "checkpoints", "report.png", "run.log"}
    first = json.loads((uninterrupted / "metrics" / "train_iter_000.json").read_text())
    for key in ("loss_total", "loss_pg", "loss_kl", "loss_entropy", "kl_divergence", "reward_mean", "grad_norm", "time/generate_s"):
        assert key in first
    assert first["grad_norm"] > 0
    assert first["reward_std"] > 0
    assert first["loss_total"] == pytest.approx(first["loss_pg"] + first["loss_kl"] + first["loss_entropy"], abs=1e-7)


def test_same_seed_same_metrics_and_another_seed_others(uninterrupted, cache, tmp_path):
    """The model included, which is built again."""
    again, other = tmp_path / "again", tmp_path / "other"
    assert run_in_child(again, f"cache_dir={tmp_path}/cache", *SMALL) == 0, printed(again)
    assert run_in_child(other, cache, "seed=1", *SMALL) == 0, printed(other)
    assert_same_files(again, uninterrupted)
    assert metrics_of(other)["train_iter_000.json"] != metrics_of(uninterrupted)["train_iter_000.json"]


@pytest.mark.parametrize("phase", KILLS)
def test_killed_and_resumed_ends_with_the_same_files(phase, uninterrupted, cache, tmp_path):
    cache = f"cache_dir={tmp_path}/cache" if phase == "building the model" else cache
    day = tmp_path / "outputs" / "2026-01-01"
    killed, fresh = day / "00-00-00-000000", day / "00-01-00-000000"
    kill = KILLS[phase]
    mishaps = {} if isinstance(kill, Kill) else {kill: partial(signal.raise_signal, signal.SIGKILL)}
    draws = phase == "drawing the report"
    code = run_in_child(killed, cache, *SMALL, kill=kill if isinstance(kill, Kill) else None, mishaps=mishaps, draws=draws)
    assert code == -signal.SIGKILL, printed(killed)
    assert run_in_child(fresh, cache, "resume=auto", *SMALL, draws=draws) == 0, printed(fresh)
    had_checkpoint = not fresh.exists()
    ended = killed if had_checkpoint else fresh
    assert_same_files(ended, uninterrupted)
    assert not draws or (ended / "report.png").stat().st_size > 10_000
    assert not list(tmp_path.rglob(".writing*")) or not had_checkpoint


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("where", "count"), [("offline_grpo.task.arithmetic:Arithmetic.score", 70), (STEP, 5)], ids=["sampling", "updating"]
)
def test_a_signal_saves_and_says_how_to_go_on(number, code, where, count, uninterrupted, cache, tmp_path):
    stopped, fresh = tmp_path / "stopped", tmp_path / "fresh"
    # In the last iteration's sampling (after three of 16 answers, two evaluations of 8), or in the updates before it: either way the third
    # iteration is the last one to count, and it would not have been saved by itself.
    kill = Kill(where, count, number=number)
    assert run_in_child(stopped, cache, *SMALL, kill=kill) == code, printed(stopped)
    assert f"stopped by {signal.Signals(number).name}; go on with resume={stopped}" in printed(stopped)
    assert run_in_child(fresh, cache, f"resume={stopped}", *SMALL) == 0, printed(fresh)
    assert not fresh.exists()
    assert metrics_of(stopped)["train_iter_002.json"] == metrics_of(uninterrupted)["train_iter_002.json"]
    assert metrics_of(stopped)["train_iter_003.json"] == metrics_of(uninterrupted)["train_iter_003.json"]


def test_a_finished_run_resumed_by_path_can_be_made_longer(cache, tmp_path):
    # A schedule that falls to the end would make the longer run another run from its first update on.
    overrides = [cache, *SMALL, "train.schedule=constant"]
    whole, run_dir, fresh = tmp_path / "whole", tmp_path / "run", tmp_path / "fresh"
    assert run_in_child(whole, *overrides) == 0, printed(whole)
    assert run_in_child(run_dir, *overrides, "train.iterations=2") == 0, printed(run_dir)
    assert run_in_child(fresh, *overrides, f"resume={run_dir}") == 0, printed(fresh)
    assert "resuming with train.iterations=4 (the checkpoint was written with 2)" in printed(fresh)
    assert_same_files(run_dir, whole)


def test_a_run_that_stops_early_stops_there_after_a_kill_too(cache, tmp_path):
    greedy = ("eval.do_sample=false", "eval.replicates=1", "eval.ks=[1]", "eval.interval=1", "checkpoint.save_interval=1")
    overrides = [cache, *SMALL, *greedy, "train.lr=1e-9", "train.stop_when.patience=2", "checkpoint.keep_best=-pass@1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_in_child(whole, *overrides) == 0, printed(whole)
    assert "stopped early after iteration 2: no better pass@1 than" in printed(whole)
    assert metrics_of(whole).keys() == {"eval_init.json"} | {f"{name}_iter_00{i}.json" for name in ("train", "eval") for i in (0, 1)}
    assert [metrics_of(whole)[f"train_iter_00{i}.json"].get("stopped_early") for i in (0, 1)] == [None, 1.0]
    mishap = {("generate", 1): partial(signal.raise_signal, signal.SIGKILL)}
    assert run_in_child(killed, *overrides, mishaps=mishap) == -signal.SIGKILL
    assert run_in_child(tmp_path / "fresh", *overrides, f"resume={killed}") == 0, printed(tmp_path / "fresh")
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed) == weights_of(whole)
    states = [json.loads((run / "checkpoints" / "iter_001" / "trainer" / "state.json").read_text()) for run in (killed, whole)]
    assert states[0]["milestones"] == states[1]["milestones"]
    assert [(run / "checkpoints" / "best").readlink().name for run in (killed, whole)] == ["iter_000"] * 2
