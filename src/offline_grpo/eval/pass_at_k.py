"""pass@k and its relatives with 95% intervals over problems: means over N problems of n replicates each, [N, n]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offline_grpo.eval.intervals import FloatArray, mean_interval, share_interval

SHARES = ("pass@", "pass_ordered@", "success_rate", "truncated_frac")
"""How the names of metrics begin that lie between 0 and 1 for every problem."""


@dataclass(frozen=True, slots=True)
class ReplicateTable:
    """What the N problems' n replicates scored, in the order in which they were seeded."""

    rewards: FloatArray  # [N, n]
    is_correct: NDArray[np.bool_]  # [N, n]
    is_truncated: NDArray[np.bool_]  # [N, n], ended at max_new_tokens
    num_tokens: NDArray[np.int64]  # [N, n], completion length, EOS included


def pass_at_k(num_correct: NDArray[np.int64], replicates: int, k: int) -> FloatArray:
    """The unbiased estimate of "at least one of k answers is right", for each problem.

    1 - C(n-c, k) / C(n, k) with n replicates of which c are right: the share of the k-subsets that contain a right one
    (Chen et al., arXiv:2107.03374, equation 1).

    Args:
        num_correct: c of each problem, [N].
    """
    by_num_correct = [1.0 - math.comb(replicates - c, k) / math.comb(replicates, k) for c in range(replicates + 1)]
    return np.array(by_num_correct)[num_correct]  # [N]


def metrics_with_intervals(table: ReplicateTable, ks: Sequence[int]) -> dict[str, float]:
    """All evaluation metrics; one that varies between problems, `m`, comes with its 95% interval as `m_low`, `m_high`.

    It says how far the number would move had other problems been drawn from the same distribution: see `intervals.py`
    for shares; rewards and lengths have Student's t, and of a single problem none.

    `reward_std_all` is the population standard deviation over all N * n rewards.
    """
    num_problems, replicates = table.rewards.shape
    metrics: dict[str, float] = {"tasks": float(num_problems), "replicates": float(replicates)}
    columns = _per_problem(table, ks)
    means = np.stack([*columns.values()], axis=1).mean(axis=0)
    for (name, values), mean in zip(columns.items(), means, strict=True):
        metrics[name] = float(mean)
        if (is_share := name.startswith(SHARES)) or num_problems > 1:
            low, high = share_interval(values) if is_share else mean_interval(values)
            metrics |= {f"{name}_low": float(low), f"{name}_high": float(high)}
    centred = table.rewards - table.rewards.mean()  # so that the second moment loses no digits to a large mean
    first, second = np.stack([centred.mean(axis=1), (centred**2).mean(axis=1)], axis=1).mean(axis=0)
    metrics["reward_std_all"] = math.sqrt(max(float(second - first**2), 0.0))
    # with as many replicates for every problem, the mean over problems is that over completions; both names are in use
    metrics["reward_mean_taskavg_all"] = metrics["reward_mean_all"]
    metrics["success_rate_taskavg_all"] = metrics["success_rate_all"]
    return metrics


def metric_names(ks: Sequence[int], replicates: int) -> list[str]:
    """The metrics of `metrics_with_intervals`, apart from counts and the ends of intervals."""
    shape = (1, replicates)
    table = ReplicateTable(
        np.zeros(shape), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
    )
    names = metrics_with_intervals(table, ks)
    return [name for name in names if name not in ("tasks", "replicates") and not name.endswith(("_low", "_high"))]


def _per_problem(table: ReplicateTable, ks: Sequence[int]) -> dict[str, FloatArray]:
    """Metric name -> its value for each problem, [N]; the metric is their mean."""
    replicates = table.rewards.shape[1]
    num_correct = table.is_correct.sum(axis=1)  # [N]
    columns: dict[str, FloatArray] = {}
    for k in ks:
        columns[f"pass@{k}"] = pass_at_k(num_correct, replicates, k)
        columns[f"pass_ordered@{k}"] = (table.is_correct[:, :k].sum(axis=1) > 0).astype(np.float64)
        columns[f"mean@{k}"] = table.rewards[:, :k].mean(axis=1)
        columns[f"best@{k}"] = table.rewards[:, :k].max(axis=1)
    columns["reward_mean_all"] = table.rewards.mean(axis=1)
    columns["success_rate_all"] = num_correct / replicates
    columns["truncated_frac"] = table.is_truncated.sum(axis=1) / replicates
    columns["completion_tokens_mean"] = table.num_tokens.sum(axis=1) / replicates
    return columns
