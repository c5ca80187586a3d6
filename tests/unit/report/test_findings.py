"""What is pointed out in a run's metrics, and what is not."""

from pathlib import Path

import numpy as np
import pytest
from factories import make_rollout
from report_folders import make_run

from offline_grpo.report.findings import LEAST_ITERATIONS, find, shared
from offline_grpo.report.history import History, load_history
from offline_grpo.train.experience import rollout_metrics
from offline_grpo.types import RolloutGroup

HEALTHY = {
    "reward_mean": (0.3, 0.8),
    "reward_std": (0.5, 0.4),
    "success_rate": (0.3, 0.8),
    "num_groups": (32.0, 32.0),
    "num_groups_trained": (30.0, 16.0),
    "entropy": (0.6, 0.3),
    "clip_frac": (0.0, 0.02),
    "completion_tokens_mean": (100.0, 120.0),
    "reward_length_correlation": (0.2, 0.1),
    "truncated_frac": (0.05, 0.02),
    "alignment/diff_abs_mean": (0.01, 0.01),
    "mismatch/ess_frac": (0.99, 0.99),
}
BETTER = {"pass@1": 0.7, "pass@1_low": 0.6}


def history(changes=None, *, iterations=20, last_eval=BETTER):
    ends = HEALTHY | (changes or {})
    train = {
        i: {key: first + (last - first) * i / (iterations - 1) for key, (first, last) in ends.items()}
        for i in range(iterations)
    }
    return History(Path("run"), train, {-1: {"pass@1": 0.3, "pass@1_low": 0.2}, iterations - 1: last_eval})


def group_of(lengths, rewards):
    pairs = zip(lengths, rewards, strict=True)
    return RolloutGroup(None, tuple(make_rollout((1, 2), (3,) * length, reward=reward) for length, reward in pairs))


def test_a_healthy_run_has_nothing_to_look_at() -> None:
    assert find(history()) == []


@pytest.mark.parametrize(
    ("changes", "observation"),
    [
        ({"scoring/num_failed": (1.0, 1.0)}, "20 rewards are 0 because the code that scores failed"),
        ({"num_updates_refused": (0.0, 1.0)}, "10 updates were skipped, whose loss or gradient was not finite"),
        (
            {"alignment/diff_abs_mean": (0.01, 0.5)},
            "trainer and engine disagree: 0.46 nats apart per token, effective sample size 99%",
        ),
        (
            {"mismatch/ess_frac": (0.99, 0.5), "async/age_mean": (2.0, 2.0)},
            "rollouts are 2 versions old at last: 0.01 nats apart per token, effective sample size 54%",
        ),
        (
            {"mismatch/ess_frac": (0.99, 0.5), "rollouts/epoch": (0.1, 2.0)},
            "the recorded rollouts are of weights far from those that are trained: 0.01 nats apart per token",
        ),
        (
            {"num_groups_trained": (20.0, 0.0), "success_rate": (0.3, 0.1), "reward_mean": (0.3, 0.3)},
            "few groups have signal at last: 5% of the groups have different rewards, 12% of the answers are right",
        ),
        ({"truncated_frac": (0.0, 0.4)}, "37% of the completions are cut off at last"),
        ({"entropy": (0.8, 0.0), "success_rate": (0.3, 0.5)}, "entropy has collapsed: from 0.737 to 0.0632 nats"),
        (
            {"success_rate": (0.3, 1.0)},
            "over-fitting: 0.94 of the answers in training are right, 0.70 on held-out problems",
        ),
        (
            {"completion_tokens_mean": (100.0, 300.0), "success_rate": (0.3, 0.3)},
            "completions get longer, and not better: from 116 to 284 tokens, right answers from 30% to 30%",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_numbers(changes, observation: str) -> None:
    (finding,) = find(history(changes))
    assert finding.observation.startswith(observation)
    assert finding.advice
    [(same, runs)] = shared({"0": [finding], "1": [finding]})
    assert (same, runs) == (finding, ["0", "1"])


def observations(run: History) -> list[str]:
    return [finding.observation for finding in find(run)]


def test_that_nothing_was_trained_is_said_of_the_shortest_run() -> None:
    nothing = {"num_groups_trained": (0.0, 0.0), "num_updates": (0.0, 0.0)}
    text = "no update was made in 2 iterations"
    assert observations(history(nothing, iterations=2)) == [f"{text}: the rewards of each group are all equal"]
    cut = history(nothing | {"num_groups_masked": (2.0, 2.0)}, iterations=2)
    assert observations(cut) == [f"{text}: all completions with different rewards were cut off"]
    refused = history({"num_updates": (0.0, 0.0), "num_updates_refused": (1.0, 1.0)}, iterations=2)
    assert observations(refused) == ["2 updates were skipped, whose loss or gradient was not finite"]
    assert find(history({"num_updates": (1.0, 1.0)}, iterations=2)) == []


def test_servers_that_were_lost_are_counted_over_all_starts_of_a_run() -> None:
    """The metrics count since a process started."""
    run = history(iterations=5)
    for metrics, *counts in zip(run.train.values(), (1, 2, 0, 0, 1), (0, 0, 0, 1, 1), strict=True):
        metrics |= dict(zip(("sync/num_recoveries", "engines/num_restarts"), counts, strict=True))
    assert observations(run) == ["servers died and were brought back: 4"]


def test_a_threshold_that_no_reward_reaches_is_named_with_the_highest_reward(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=2, solved=0, success_rate=0.0)
    config = run / ".hydra" / "config.yaml"
    config.write_text(config.read_text() + "task: {correct_threshold: 1.5}\n")
    [finding] = find(load_history(run))
    assert finding.observation == (
        "pass@1 is 0 because no reward reached task.correct_threshold=1.5: highest reward seen 1"
    )


def test_what_is_on_already_is_no_advice() -> None:
    (finding,) = find(history({"truncated_frac": (0.0, 0.4), "num_groups_masked": (0.0, 0.0)}))
    assert finding.advice == "a larger generation.max_new_tokens"


def test_findings_of_several_runs_are_said_once_with_ranges() -> None:
    worse = {"reward_mean": (0.3, 0.1), "success_rate": (0.3, 0.1), "truncated_frac": (0.0, 0.5)}
    found = {
        "a": find(history(worse, last_eval={"pass@1": 0.1, "pass@1_high": 0.19})),
        "b": find(history({"truncated_frac": (0.0, 0.4)})),
        "c": find(history(worse, last_eval={"pass@1": 0.00001, "pass@1_high": 0.19})),
    }
    text = "the model has got worse: held-out pass@1 from 0.3 to 1e-05\u20130.1, and the intervals do not meet"
    cut = "37\u201346% of the completions are cut off at last"
    assert [(each.observation, runs) for each, runs in shared(found)] == [(text, ["a", "c"]), (cut, ["a", "b", "c"])]


def test_a_reward_that_rises_alone() -> None:
    run = history({"success_rate": (0.3, 0.3)}, last_eval={"pass@1": 0.28, "pass@1_low": 0.2})
    text = "the reward rises, and held-out pass@1 does not: reward from 0.339 to 0.761, pass@1 from 0.3 to 0.28"
    assert observations(run) == [text]


def test_few_iterations_show_no_trend() -> None:
    assert find(history({"truncated_frac": (0.5, 0.5)}, iterations=LEAST_ITERATIONS - 1)) == []
    assert find(history({"truncated_frac": (0.5, 0.5)}, iterations=LEAST_ITERATIONS))


def test_a_run_that_recorded_little_is_no_error() -> None:
    assert find(History(Path("run"), {i: {"reward_mean": 0.0} for i in range(20)}, {})) == []


def test_reward_against_length_is_that_within_groups() -> None:
    """Against numpy, on groups whose means differ: hard problems have longer answers, which is not what is asked."""
    rng = np.random.default_rng(0)
    groups, x, y = [], [], []
    for _ in range(6):
        lengths, rewards = rng.integers(1, 20, 5) + rng.integers(0, 50), rng.random(5) + rng.random()
        groups.append(group_of(lengths.tolist(), rewards.tolist()))
        x += (rewards - rewards.mean()).tolist()
        y += (lengths - lengths.mean()).tolist()
    assert rollout_metrics(groups)["reward_length_correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert "reward_length_correlation" not in rollout_metrics([group_of([3, 3], [0.0, 1.0])])
