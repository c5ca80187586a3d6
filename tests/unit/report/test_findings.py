"""What is pointed out in a run's metrics, and what is not."""

from pathlib import Path
from typing import Any

import pytest
from run_folders import make_run

from offline_grpo.report.findings import find, shared
from offline_grpo.report.runs import Run, load_run

HEALTHY = (
    {"reward_mean": (0.3, 0.8), "reward_std": (0.5, 0.4), "success_rate": (0.3, 0.8)}
    | {"num_groups": (32.0, 32.0), "num_groups_zero_signal": (2.0, 16.0), "entropy": (0.6, 0.3)}
    | {"completion_tokens_mean": (100.0, 120.0), "truncated_frac": (0.05, 0.02)}
    | {"alignment/diff_abs_mean": (0.01, 0.01), "mismatch/ess_frac": (0.99, 0.99)}
)
FIRST = {"pass@1": 0.3, "pass@1_low": 0.2, "pass@1_high": 0.4}
BETTER = {"pass@1": 0.7, "pass@1_low": 0.6, "pass@1_high": 0.8}


def history(changes: Any = None, *, iterations: int = 20, last_eval: Any = BETTER) -> Run:
    ends = HEALTHY | (changes or {})
    train = {
        i: {key: first + (last - first) * i / (iterations - 1) for key, (first, last) in ends.items()}
        for i in range(iterations)
    }
    return Run(Path("run"), train, {-1: FIRST, iterations - 1: last_eval})


def observations(run: Run) -> list[str]:
    return [finding.observation for finding in find(run)]


def test_healthy_runs_and_runs_that_recorded_little_have_nothing_to_look_at() -> None:
    assert find(history()) == []
    assert find(Run(Path("run"), {i: {"reward_mean": 0.0} for i in range(20)}, {})) == []
    assert find(history({"truncated_frac": (0.5, 0.5)}, iterations=9)) == [], "noise looks like a trend"
    assert find(history({"num_updates": (1.0, 1.0)}, iterations=2)) == []
    few = {"measured/calls": (9.0, 9.0), "measured/malformed_calls": (1.0, 1.0)}
    assert find(history(few, iterations=2)) == [], "a tenth is not pointed out"


CUT, EQUAL = {"num_groups_masked": (2.0, 2.0)}, "no completion has an advantage"
FELL = {"pass@1": 0.1, "pass@1_low": 0.05, "pass@1_high": 0.19}
FLAT = {"pass@1": 0.28, "pass@1_low": 0.2, "pass@1_high": 0.36}


@pytest.mark.parametrize(
    ("changes", "how", "observation"),
    [
        ({"num_updates_refused": (0.0, 1.0)}, {}, "10 updates were skipped"),
        ({"alignment/diff_abs_mean": (0.01, 0.5)}, {}, "trainer and engine disagree: 0.46 nats apart per token"),
        ({"mismatch/ess_frac": (0.99, 0.5), "async/age_mean": (2.0, 2.0)}, {}, "rollouts are 2 versions old"),
        (
            {"num_groups_zero_signal": (2.0, 32.0), "success_rate": (0.3, 0.1), "reward_mean": (0.3, 0.3)},
            {},
            "few groups",
        ),
        ({"truncated_frac": (0.0, 0.4)}, {}, "37% of the completions are cut off at last"),
        ({"success_rate": (0.3, 1.0)}, {}, "over-fitting: 0.94 of the answers in training are right, 0.70"),
        ({"entropy": (0.8, 0.0), "success_rate": (0.3, 0.5)}, {}, "entropy has collapsed: from 0.737 to 0.0632 nats"),
        ({"kl_divergence": (0.0, 30.0)}, {}, "the policy is far from the reference: a KL divergence of 27.6 nats"),
        ({"completion_tokens_mean": (100.0, 300.0), "success_rate": (0.3, 0.3)}, {}, "completions get longer, and not"),
        ({"completion_tokens_mean": (40.0, 9.0), "success_rate": (0.1, 0.5)}, {}, "completions get much shorter: from"),
        ({"success_rate": (0.3, 0.3)}, {"last_eval": FLAT}, "the reward rises, and held-out pass@1 does not: reward"),
        ({"reward_mean": (0.3, 0.1), "success_rate": (0.3, 0.1)}, {"last_eval": FELL}, "the model has got worse: held"),
        ({"num_updates": (0.0, 0.0)}, {"iterations": 2}, f"no update was made in 2 iterations: {EQUAL}"),
        ({"num_updates": (0.0, 0.0)} | CUT, {"iterations": 2}, "no update was made in 2 iterations: all completions"),
        ({"measured/calls": (4.0, 2.0), "measured/malformed_calls": (0.0, 2.0)}, {"iterations": 2}, "25% of the calls"),
    ],
)
def test_what_is_wrong_is_said_with_its_numbers(changes: Any, how: Any, observation: str) -> None:
    (found,) = observations(history(changes, **how))
    assert found.startswith(observation)


def test_what_a_run_that_solves_its_problems_also_does_is_not_pointed_out() -> None:
    """The default run ends with a third of its entropy, signal in a seventh of the groups and a KL divergence of 1."""
    solved = {"success_rate": (0.5, 0.97), "entropy": (0.6, 0.1), "num_groups_zero_signal": (2.0, 27.0)}
    run = history(
        solved | {"completion_tokens_mean": (40.0, 9.0), "kl_divergence": (0.0, 6.0)}, last_eval={"pass@1": 0.95}
    )
    run.train[18] |= {"kl_divergence": 65.0}
    assert observations(run) == []


def test_a_policy_that_became_certain_too_early() -> None:
    """As SmolLM2-135M did in 60 iterations on sums: pass@1 from 0.11 to 0.50, then flat."""
    sums = {"success_rate": (0.0, 0.42), "entropy": (1.9, 0.0), "num_groups_zero_signal": (16.0, 24.0)}
    run = history(sums | {"completion_tokens_mean": (40.0, 9.0)})
    assert [text.partition(":")[0] for text in observations(run)] == [
        "few groups have signal at last",
        "entropy has collapsed",
        "completions get much shorter",
    ]
    clipped = history(sums | {"clip_frac": (0.05, 0.05)})
    assert ["dapo" in each.advice for each in (*find(run), *find(clipped)) if each.metric == "train/entropy"] == [0, 1]


def test_servers_that_were_lost_are_counted_over_all_starts_of_a_run() -> None:
    """The metrics count since a process started."""
    run = history(iterations=5)
    for metrics, *counts in zip(run.train.values(), (1, 2, 0, 0, 1), (0, 0, 0, 1, 1), strict=True):
        metrics |= dict(zip(("sync/num_recoveries", "engines/num_restarts"), counts, strict=True))
    assert observations(run) == ["servers died and were brought back: 4"]


def test_a_threshold_that_no_reward_reaches_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=2, solved=0, success_rate=0.0)
    config = run / ".hydra" / "config.yaml"
    config.write_text(config.read_text() + "task: {correct_threshold: 1.5}\n")
    seen = "task.correct_threshold=1.5: the highest reward seen is 1"
    assert observations(load_run(run)) == [f"pass@1 is 0 because no reward reached {seen}"]


def test_findings_of_several_runs_are_said_once() -> None:
    found = {name: find(history({"truncated_frac": (0.0, last)})) for name, last in (("a", 0.4), ("b", 0.0), ("c", 1))}
    [(each, runs)] = shared(found)
    assert (each.observation, runs) == ("37% of the completions are cut off at last", ["a", "c"])
