"""A run that dies anywhere and is resumed ends with the files of a run that did not die."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from runs import SMALL, Kill, Mishaps, metrics_of, printed, run_command, run_in_child, weights_of

from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.report.runs import read_yaml

SMALL = (*SMALL, Mishaps.override)
ROOT = Path(__file__).parents[2]
OFFLOAD = "train.optimizer.offload=true"
STEP, SCORE = "torch.optim:AdamW.step", "offline_grpo.task.arithmetic:Arithmetic.score"
KILLS = {
    "building the model": Kill("offline_grpo.model.tiny:TinyModel.prepare", 1),
    "before the checkpoint counts": Kill("offline_grpo.checkpoint.checkpointer:Checkpointer.commit", 1),
    "drawing the report": Kill("matplotlib.figure:Figure.savefig", 1),
}
"""A call that is not made. test_random_kills.py has other moments."""
QUICK = {"before the checkpoint counts", "in the second update of the third"}
"""Those of `KILLS` and `STOPS` that are no slow tests."""


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "outputs" / "2026-01-01" / "00-00-00-000000"
    assert run_in_child(run_dir, cache, *SMALL, draws=True) == 0, printed(run_dir)
    return run_dir


def assert_same_files(run_dir, expected):
    assert metrics_of(run_dir) == metrics_of(expected)
    assert weights_of(run_dir) == weights_of(expected)
    assert len(weights_of(run_dir)) == 2
    assert samples_of(run_dir) == samples_of(expected)
    assert (run_dir / "report.png").exists()


def samples_of(run_dir):
    return {path.name: path.read_bytes() for path in (run_dir / "samples").iterdir()}


def test_a_run_leaves_its_record(uninterrupted):
    assert (uninterrupted / "report.png").stat().st_size > 10_000
    names = [f"train_iter_{i:03d}.json" for i in range(4)] + [
        "eval_init.json",
        "eval_iter_001.json",
        "eval_iter_003.json",
    ]
    assert {*metrics_of(uninterrupted)} == {*names}
    files = {"metrics", "checkpoints", "samples", "rollouts", "report.png", "run.log", "environment.json"}
    assert {path.name for path in uninterrupted.iterdir()} == files
    first = metrics_of(uninterrupted)["train_iter_000.json"]
    assert first["grad_norm"] > 0
    assert first["reward_std"] > 0
    assert first["loss_total"] == pytest.approx(first["loss_pg"] + first["loss_kl"] + first["loss_entropy"], abs=1e-7)


def test_another_seed_draws_others(uninterrupted, cache, tmp_path):
    """The same one draws the same: the tests below."""
    other = tmp_path / "other"
    assert run_in_child(other, cache, "seed=1", *SMALL, "train.iterations=1") == 0, printed(other)
    assert metrics_of(other)["train_iter_000.json"] != metrics_of(uninterrupted)["train_iter_000.json"]


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[] if phase in QUICK else pytest.mark.slow) for phase in KILLS]
)
def test_killed_and_resumed_ends_with_the_same_files(phase, uninterrupted, cache, tmp_path):
    cache = f"cache_dir={tmp_path}/cache" if phase == "building the model" else cache
    day = tmp_path / "outputs" / "2026-01-01"
    killed, fresh = day / "00-00-00-000000", day / "00-01-00-000000"
    draws = phase == "drawing the report"
    code = run_in_child(killed, cache, *SMALL, kill=KILLS[phase], draws=draws)
    assert code == -signal.SIGKILL, printed(killed)
    assert run_in_child(fresh, cache, "resume=auto", *SMALL, draws=draws) == 0, printed(fresh)
    had_checkpoint = not fresh.exists()
    assert had_checkpoint or not draws
    ended = killed if had_checkpoint else fresh
    assert_same_files(ended, uninterrupted)
    assert not draws or (ended / "report.png").stat().st_size > 10_000
    assert not list(tmp_path.rglob(".writing*")) or not had_checkpoint


# The 4 iterations: an evaluation of 8 answers, and in each 16 answers (SCORE) and 2 updates (STEP). Evaluations of 8
# answers after the second and the fourth.
STOPS = {
    # what is under way -> where the signal comes, the number of the last complete iteration, the line that is printed
    "in the second update of the third": (Kill(STEP, 6), 3, "stopping after "),
    "evaluating after the last": (Kill(SCORE, 8 + 4 * 16 + 8 + 5), 4, "stopping"),
}


@pytest.mark.parametrize(
    "under_way", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in STOPS]
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(under_way, uninterrupted, cache, tmp_path):
    kill, num_complete, line = STOPS[under_way]
    number = signal.SIGUSR1 if under_way == "in the second update of the third" else signal.SIGINT
    stopped, fresh = tmp_path / "stopped", tmp_path / "fresh"
    assert run_in_child(stopped, cache, *SMALL, kill=replace(kill, number=number)) == 128 + number, printed(stopped)
    assert re.search(f"{'Ctrl-C' if number == signal.SIGINT else number.name}: {line}", printed(stopped))
    assert f"stopped by {number.name}; go on with: uv run run_grpo.py resume={stopped}" in printed(stopped)
    assert latest_checkpoint(stopped / "checkpoints").name == f"iter_{num_complete - 1:03d}"
    assert len(list(stopped.glob("metrics/train*"))) == num_complete
    assert run_in_child(fresh, cache, f"resume={stopped}", *SMALL) == 0, printed(fresh)
    assert not fresh.exists()
    assert metrics_of(stopped) == metrics_of(uninterrupted)
    assert weights_of(stopped).items() >= weights_of(uninterrupted).items()


def test_a_signal_in_the_last_seconds_loses_nothing(uninterrupted, cache, tmp_path):
    run_dir = tmp_path / "run"
    kill = Kill("offline_grpo.checkpoint.checkpointer:torch.save", 2, "after", number=signal.SIGTERM)
    assert run_in_child(run_dir, cache, *SMALL, kill=kill) == 0, printed(run_dir)
    assert "SIGTERM: stopping after " in printed(run_dir)
    assert_same_files(run_dir, uninterrupted)
    assert re.search("^pass@1", printed(run_dir), re.MULTILINE)


def test_a_signal_before_anything_is_saved_says_that_and_leaves_no_folder(tmp_path):
    run_dir = tmp_path / "run"
    kill = Kill(STEP, 3, number=signal.SIGTERM)
    assert run_in_child(run_dir, f"cache_dir={tmp_path}/cache", *SMALL, kill=kill) == 143, printed(run_dir)
    assert printed(run_dir).splitlines()[-2:] == ["SIGTERM: stopping", "stopped by SIGTERM; nothing was saved"]
    assert not run_dir.exists()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_a_command_goes_on_with_the_configuration_of_its_run(cache, tmp_path):
    """The line that the run printed when it was stopped, and more iterations. A key in a variable is in no record."""
    run_dir, words = tmp_path / "a run", (*SMALL[:-1], "train/loss=dapo", "eval.enabled=false")
    words += ("+generation.api_key=${oc.env:PATH}",)
    words += ("train.iterations=2", f"hydra.run.dir='{run_dir}'")
    first = run_command(tmp_path, ROOT / "run_grpo.py", cache, *words)
    assert first.returncode == 0, first.stderr
    again = run_command(tmp_path, ROOT / "run_grpo.py", "resume='a run'", "train.iterations=4", "train.lr=1e-5")
    assert again.returncode == 0, again.stderr
    assert "changed: train.iterations=4 (was 2), train.lr=1e-05 (was 0.0003)" in again.stdout
    assert "learning rate: continues at 1e-05 at update 4 and falls to 0 at update 8 (linear)" in again.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a run"]
    lrs = [metrics["lr"] for metrics in metrics_of(run_dir).values()]
    assert lrs == pytest.approx([2.25e-4, 0.75e-4, 0.75e-5, 0.25e-5])
    config, starts = (read_yaml(run_dir / ".hydra" / f"{name}.yaml") for name in ("config", "starts"))
    assert config["train"]["loss"]["_target_"].endswith("DAPO")
    assert config["train"]["iterations"] == 4
    records = [path.read_text() for path in run_dir.glob(".hydra/*.yaml")]
    assert ["api_key=${oc.env:PATH}" in text for text in records].count(True) == 3  # overrides, starts, and hydra
    assert not any(os.environ["PATH"] in text for text in records)
    assert config["eval"]["max_new_tokens"] == "${generation.max_new_tokens}"
    assert [start.get("after_iteration") for start in starts] == [None, 2]
    assert starts[1]["changes"]["train.iterations"] == [2, 4]
    finished = run_command(tmp_path, ROOT / "run_grpo.py", "resume='a run'")
    line = r"^finished: 4 of 4 iterations; longer: .* train.iterations=8 train.lr=1e-05; anew: leave resume out$"
    assert re.search(line, finished.stdout, re.MULTILINE), finished.stdout
    other = ("train.precision=bf16", "train.iterations=6")
    refused = run_command(tmp_path, ROOT / "run_grpo.py", "resume='a run'", *other)
    assert refused.returncode == 2
    assert "error: train.precision=bf16: the resumed run has fp32, and its weights and masters" in refused.stderr
    assert read_yaml(run_dir / ".hydra" / "config.yaml") == config


@pytest.mark.slow
def test_failed_scores_and_a_curriculum_are_resumed_and_replayed_bit_for_bit(cache, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": f"{2 * i}"}) + "\n" for i in range(12)))
    common = ("data.num_train_seeds=null", "data.shuffle=false", "scoring.workers=2", "train.iterations=6")
    common += ("task=dataset", f"task.path={rows}", "task.reward=bad_rewards:flaky", "model.tiny.warm_start_steps=0")
    common += ("train.drop_zero_signal_groups=true", "eval.enabled=false", "train.updates_per_iteration=1")
    ours = (*common, "data.resample_zero_signal=true", "data.max_resamples=1", "data.pass_rate=[0.4,0.6]")
    whole, killed, again = tmp_path / "whole", tmp_path / "killed", tmp_path / "again"
    assert run_in_child(whole, cache, *SMALL, *ours) == 0, printed(whole)
    kill = Kill("offline_grpo.checkpoint.checkpointer:Checkpointer.commit", 2)
    assert run_in_child(killed, cache, *SMALL, *ours, kill=kill) == -signal.SIGKILL, printed(killed)
    assert run_in_child(tmp_path / "fresh", cache, f"resume={killed}", *SMALL, *ours) == 0, printed(tmp_path / "fresh")
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed).items() >= weights_of(whole).items()
    found = list(metrics_of(whole).values())
    for name in ("scoring/num_failed_raised", "curriculum/num_passed_over", "curriculum/num_outside"):
        assert any(metrics[name] for metrics in found), name
    assert run_in_child(again, cache, *SMALL, *common, "rollouts=replay", f"rollouts.path={whole}") == 0, printed(again)
    for expected, metrics in zip(found, metrics_of(again).values(), strict=True):
        for name in ("loss_total", "grad_norm", "reward_mean", "num_groups_trained", "scoring/num_failed"):
            assert metrics.get(name) == expected.get(name), name


@pytest.mark.slow
def test_a_killed_and_resumed_run_with_offload_ends_as_one_without(cache, tmp_path):
    """On a CPU both use the same kernel. Resumed with offload, and, from the same checkpoint, without."""
    words = (*SMALL, cache, "train.precision=bf16", "train.grad_clip=0.05")
    resident, killed, other = (tmp_path / name for name in ("resident", "killed", "other"))
    assert run_in_child(resident, *words) == 0, printed(resident)
    kill = Kill("offline_grpo.train.optimizer:OffloadedAdamW.step", 6)
    assert run_in_child(killed, *words, OFFLOAD, kill=kill) == -signal.SIGKILL, printed(killed)
    shutil.copytree(killed, other)
    for run, more in ((killed, (OFFLOAD,)), (other, ())):
        assert run_in_child(tmp_path / "fresh", *words, *more, f"resume={run}") == 0, printed(tmp_path / "fresh")
        assert metrics_of(run) == metrics_of(resident)
        assert weights_of(run) == weights_of(resident)
