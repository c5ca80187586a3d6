"""Whole runs of episodes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from runs import SMALL, Kill, metrics_of, printed, run_in_child, run_in_children, weights_of
from worlds import write_sums

pytestmark = pytest.mark.slow


def played(path: Path, count: int, largest: int) -> tuple[str, ...]:
    write_sums(path, count, largest)
    return (
        *("task=environment", "task.environment=worlds:Sums", f"task.path={path}", "task.max_environment_tokens=40"),
        *("task.max_turn_tokens=6", "generation.max_new_tokens=18", "task.correct_threshold=0.99"),
        *("model.tiny.hidden_size=32", "model.tiny.warm_start_steps=120", "num_threads=1", "eval.max_new_tokens=18"),
    )


def test_two_processes_play_what_one_plays_and_a_replay_trains_on_it(cache: str, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith(("task.", "data.num_train_seeds", "model.tiny"))]
    words += [*played(tmp_path / "sums.jsonl", 300, 20), "data.resample_zero_signal=true"]
    words += [cache, "data.problems_per_iteration=5", "train.iterations=1", "eval.interval=1"]
    words += ["model.tiny.warm_start_batch_size=32"]  # it need not know much
    alone, together, again = tmp_path / "alone", tmp_path / "together", tmp_path / "again"
    assert run_in_child(alone, *words) == 0, printed(alone)
    assert run_in_children(2, together, *words) == [0, 0], printed(together)
    expected, found = metrics_of(alone), metrics_of(together)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
    first, same = (pq.read_table(run / "rollouts" / "iter_000.parquet") for run in (alone, together))
    assert first.drop(["logprobs"]) == same.drop(["logprobs"])  # batches of other sizes round otherwise
    shown = json.loads((alone / "samples" / "iter_000.jsonl").read_text().splitlines()[0])["rendered"]
    assert [who for who, _ in shown] == ["prompt", "policy", "user", "policy", "user", "policy"]
    assert shown[0][1].startswith("<bos>"), "as the tokens say"
    words = [word for word in words if not word.startswith("data.")]
    assert run_in_child(again, *words, "rollouts=replay", f"rollouts.path={alone}", "train.iterations=1") == 0
    [replayed] = [own for name, own in metrics_of(again).items() if name.startswith("train_iter")]
    assert replayed["mismatch/kl_k3"] < 1e-9, "the logprobs are those of the tokens that were sampled"
    assert replayed["reward_mean"] == pytest.approx(expected["train_iter_000.json"]["reward_mean"])


def test_an_episode_of_several_sequences_is_trained_alike_by_two_processes_resumed_and_replayed(
    cache: str, tmp_path: Path
) -> None:
    words = [word for word in SMALL if not word.startswith(("task.", "data.num_train_seeds", "model.tiny"))]
    words += [*played(tmp_path / "sums.jsonl", 100, 20), "model.tiny.warm_start_batch_size=32", "train.batch_size=3"]
    words += ["train.iterations=2", "eval.interval=2", "checkpoint.save_interval=1", "scoring.workers=2", cache]
    words = [word for word in words if word not in ("task=environment", "task.environment=worlds:Sums")]
    words += ["task=agent", "task.agent=worlds:forks"]
    whole, together, killed, again = (tmp_path / name for name in ("whole", "together", "killed", "again"))
    assert run_in_child(whole, *words) == 0, printed(whole)
    expected = metrics_of(whole)
    first = expected["train_iter_000.json"]
    assert 4 < first["measured/turns"] <= 5, "but for replies that are cut off"
    assert 2 < first["measured/sequences"] <= 3
    assert first["num_tokens_trained"] == first["num_completion_tokens"], "every sampled token once"
    shown = json.loads((whole / "samples" / "iter_000.jsonl").read_text().splitlines()[0])["rendered"]
    assert [who for who, _ in shown if who.startswith("sequence")] == [f"sequence {i} of 3" for i in (1, 2, 3)]

    assert run_in_children(2, together, *words, "train.iterations=1") == [0, 0], printed(together)
    found = metrics_of(together)["train_iter_000.json"] | {"lr": first["lr"]}  # of another schedule
    assert found == pytest.approx(first, abs=1e-5, rel=1e-4)

    kill = Kill("offline_grpo.checkpoint.checkpointer:Checkpointer.commit", 2)
    assert run_in_child(killed, *words, kill=kill) == -signal.SIGKILL, printed(killed)
    assert run_in_child(tmp_path / "fresh", f"resume={killed}", *words) == 0, printed(tmp_path / "fresh")
    assert metrics_of(killed) == expected
    assert weights_of(killed).items() >= weights_of(whole).items()

    replay = ("rollouts=replay", f"rollouts.path={whole}", "eval.enabled=false")
    own = [word for word in words if not word.startswith("data.")]
    assert run_in_child(again, *own, *replay) == 0, printed(again)
    for name, metrics in metrics_of(again).items():
        for key in ("loss_total", "grad_norm", "advantage_std", "num_tokens_trained"):
            assert metrics[key] == expected[name][key], (name, key)


def test_a_game_of_three_turns_is_learnt(cache: str, tmp_path: Path) -> None:
    run, paid = tmp_path / "run", ("task.environment=worlds:PaidSums", "train/advantage=per_turn")
    words = (*played(tmp_path / "sums.jsonl", 600, 4), *paid, cache, "train.iterations=24", "eval.interval=24")
    words += ("train.lr=3e-3", "train.kl_coef=0", "data.problems_per_iteration=16", "data.rollouts_per_problem=8")
    assert run_in_child(run, *words, "eval.num_ids=50", "scoring.workers=0", "checkpoint.enabled=false") == 0, printed(
        run
    )
    before, after = (metrics_of(run)[name] for name in ("eval_init.json", "eval_iter_023.json"))
    assert after["pass@1_low"] > before["pass@1_high"]
