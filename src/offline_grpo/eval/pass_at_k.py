"""pass@k and its relatives with 95% intervals over problems: means over N problems of n replicates each, [N, n]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
INTERVAL_PERCENTILES = (2.5, 97.5)


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


def metrics_with_intervals(
    table: ReplicateTable, ks: Sequence[int], *, bootstrap_samples: int, seed: int
) -> dict[str, float]:
    """All evaluation metrics; a metric `m` that varies between problems comes with its 95% interval as `m_low` and
    `m_high`.

    The interval is the percentile bootstrap over problems: it says how far the number would move had other problems
    been drawn from the same distribution. Where all problems scored alike it has no width, however few they are.

    `reward_std_all` is the population standard deviation over all N * n rewards.
    """
    num_problems, replicates = table.rewards.shape
    means = _per_problem(table, ks)
    offset = table.rewards.mean()
    centred = table.rewards - offset  # so that the second moment below loses no digits to a large mean
    columns = np.stack([*means.values(), centred.mean(axis=1), (centred**2).mean(axis=1)], axis=1)  # [N, M + 2]

    point = _with_std(columns.mean(axis=0, keepdims=True))[0]  # [M + 1]
    resampled = _with_std(_bootstrap_means(columns, bootstrap_samples, seed))  # [B, M + 1]
    low, high = np.percentile(resampled, INTERVAL_PERCENTILES, axis=0)

    metrics: dict[str, float] = {"tasks": float(num_problems), "replicates": float(replicates)}
    for i, name in enumerate([*means, "reward_std_all"]):
        metrics |= {name: float(point[i]), f"{name}_low": float(low[i]), f"{name}_high": float(high[i])}
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
    names = metrics_with_intervals(table, ks, bootstrap_samples=1, seed=0)
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


def _with_std(means: FloatArray) -> FloatArray:
    """Replace the last two columns, first and second moment, by the standard deviation: [R, M + 2] -> [R, M + 1]."""
    variance = means[:, -1] - means[:, -2] ** 2
    return np.column_stack([means[:, :-2], np.sqrt(np.maximum(variance, 0.0))])


def _bootstrap_means(columns: FloatArray, num_samples: int, seed: int) -> FloatArray:
    """Column means over `num_samples` draws of N rows with replacement: [N, M] -> [num_samples, M]."""
    num_rows = len(columns)
    rng = np.random.default_rng(seed)
    # One draw at a time: all of them at once would need num_samples * N numbers, gigabytes for a large benchmark.
    draws = (np.bincount(rng.integers(num_rows, size=num_rows), minlength=num_rows) for _ in range(num_samples))
    return np.stack([times_drawn @ columns for times_drawn in draws]) / num_rows
