"""The estimators against hand-computed numbers and brute force over all subsets."""

from itertools import combinations
from statistics import pstdev

import numpy as np
import pytest

from offline_grpo.eval.pass_at_k import ReplicateTable, metrics_with_intervals, pass_at_k


def table_of(correct: list[list[int]], rewards: list[list[float]] | None = None) -> ReplicateTable:
    is_correct = np.array(correct, dtype=bool)
    return ReplicateTable(
        rewards=np.array(correct if rewards is None else rewards, dtype=float),
        is_correct=is_correct,
        is_truncated=np.zeros_like(is_correct),
        num_tokens=np.full(is_correct.shape, 7),
    )


@pytest.mark.parametrize("replicates", [1, 6])
def test_agrees_with_the_share_of_subsets_that_hold_a_right_answer(replicates: int) -> None:
    for num_correct in range(replicates + 1):
        answers = [True] * num_correct + [False] * (replicates - num_correct)
        for k in range(1, replicates + 1):
            subsets = list(combinations(answers, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(np.array([num_correct]), replicates, k)[0] == pytest.approx(share, abs=1e-14)


def test_exact_where_binomials_exceed_float_range() -> None:
    # 1 of 2000 right, k = 1000: half of all subsets hold it; C(2000, 1000) is about 1e600.
    assert pass_at_k(np.array([1]), 2000, 1000)[0] == pytest.approx(0.5, abs=1e-12)


def test_all_metrics_of_a_hand_computed_table() -> None:
    table = ReplicateTable(
        rewards=np.array([[0.0, 1.0, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]]),
        is_correct=np.array([[False, True, False, False], [False, False, False, False]]),
        is_truncated=np.array([[True, False, False, False], [False, False, True, True]]),
        num_tokens=np.array([[1, 2, 3, 4], [10, 10, 10, 20]]),
    )
    metrics = metrics_with_intervals(table, [1, 2])
    rewards = [0.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    expected = {"tasks": 2, "replicates": 4, "pass@1": 0.125, "pass@2": 0.25, "pass_ordered@1": 0.0}
    expected |= {"pass_ordered@2": 0.5, "mean@1": 0.125, "mean@2": (0.5 + 0.25) / 2, "best@1": 0.125}
    expected |= {"best@2": (1.0 + 0.25) / 2, "reward_mean_all": 0.375, "reward_std_all": pstdev(rewards)}
    expected |= {"success_rate_all": 0.125, "truncated_frac": 3 / 8, "completion_tokens_mean": (10 + 50) / 8}
    expected |= {"reward_mean_taskavg_all": 0.375, "success_rate_taskavg_all": 0.125}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    without = {"tasks", "replicates", "reward_std_all", "reward_mean_taskavg_all", "success_rate_taskavg_all"}
    with_interval = set(expected) - without
    assert set(metrics) == set(expected) | {f"{key}_{end}" for key in with_interval for end in ("low", "high")}
    half = 12.7062 * 0.125  # t with one degree of freedom; problems' means are 0.5 and 0.25
    ends = [metrics[f"reward_mean_all_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([0.375 - half, 0.375 + half], rel=1e-5)
