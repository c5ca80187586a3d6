"""pass@k and its relatives, 95% intervals of means over problems and over seeds, and which of two models is better.
`tests/unit/eval/test_statistics.py` simulates how often the intervals hold the true value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
OF_SHARES = (0.0, 0.0, 1.0, 1.0)
OF_DIFFERENCES = (-1.0, 1.0)
"""Values that `share_interval` adds; the least and the greatest are the ends of what is possible."""


def share_interval(values: FloatArray, added: Sequence[float] = OF_SHARES) -> tuple[FloatArray, FloatArray]:
    """Of the mean over N problems of a share, such as pass@k, or of a difference of shares, [N, ...] -> ([...], [...]).

    Mean and spread are those of the problems and a few made-up ones, so that the interval has a width where all scored
    alike. With one replicate it is Agresti and Coull's for a share (The American Statistician 52, 1998: two solved and
    two unsolved problems) and Bonett and Price's for a paired difference (Journal of Educational and Behavioral
    Statistics 37, 2012: one of each sign), with Student's t in place of the normal quantile. It stays right with
    several replicates, because the spread is that between problems.
    """
    count, low, high = len(values) + len(added), min(added), max(added)
    mean = (values.sum(0) + sum(added)) / count
    variance = ((values**2).sum(0) + sum(value**2 for value in added)) / count - mean**2
    half = t_975(max(len(values) - 1, 1)) * np.sqrt(variance / count)
    return np.clip(mean - half, low, high), np.clip(mean + half, low, high)


def mean_interval(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of means over N >= 2 rows, [N, ...] -> ([...], [...]): mean ± t * s / sqrt(N), Student's t with N - 1 degrees of
    freedom. It assumes a normal spread.
    """
    count = len(values)
    half = t_975(count - 1) * values.std(0, ddof=1) / math.sqrt(count)
    return values.mean(0) - half, values.mean(0) + half


def t_p_value(differences: FloatArray) -> float:
    """The two-sided p-value of Student's paired test: N >= 2 differences, not all alike, whose mean may be 0."""
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return t_tails(abs(float(differences.mean())) / error, len(differences) - 1)


def t_tails(t: float, freedom: int) -> float:
    """The probability of a value as far from 0 as `t` or farther (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    is_odd = freedom % 2
    term, total = math.cos(angle) if is_odd else 1.0, 0.0
    for i in range(freedom // 2):
        total += term
        term *= (2 * i + 1 + is_odd) / (2 * i + 2 + is_odd) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return max(0.0, 1.0 - ((angle + total) * 2 / math.pi if is_odd else total))


@cache
def t_975(freedom: int) -> float:
    """The 97.5% quantile of Student's t, by bisection."""
    low, high = 1.9, 12.8
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, freedom) > 0.05 else (low, middle)
    return low


# Which of two models is better.


@dataclass(frozen=True, slots=True)
class PairedResult:
    """`difference` is second minus first; `low` and `high` are its 95% interval; `p_value` is two-sided."""

    difference: float
    low: float
    high: float
    p_value: float
    num_problems: int
    num_better: int  # problems that the second solved more often
    num_worse: int


def compare(first: NDArray[np.int64], second: NDArray[np.int64], replicates: int | NDArray[np.int64]) -> PairedResult:
    """Compare success rates problem by problem.

    Interval and p-value are about these two models, on problems like these; of the settings that
    trained them they say nothing, because another seed makes other models. The p-value is that of Fisher's
    randomisation test for pairs (The Design of Experiments, 1935, section 21): were the models alike, each problem's
    difference would be as likely with the other sign. With one replicate that is the exact sign test (McNemar's).

    Args:
        first, second: right answers of each problem, [N], out of `replicates`, which both tried.
    """
    differences = second - first  # [N]
    rates = differences / replicates
    low, high = share_interval(rates, OF_DIFFERENCES)
    return PairedResult(
        difference=float(rates.mean()),
        low=float(low),
        high=float(high),
        p_value=sign_flip_p_value(differences),
        num_problems=len(differences),
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
    )


def sign_flip_p_value(differences: NDArray[np.int64]) -> float:
    """The share of the 2^N ways to sign the N whole numbers whose sum is as far from 0 as the one that was seen.

    The distribution of the sum is built up number by number: [2 S + 1] probabilities, S the sum of sizes.
    """
    sizes = np.abs(differences[differences != 0])
    total = int(sizes.sum())
    distribution: FloatArray = np.zeros(2 * total + 1)
    distribution[total] = 1.0  # nothing is added yet: the sum is 0
    for size in sizes:
        distribution = 0.5 * (
            np.roll(distribution, size) + np.roll(distribution, -size)
        )  # its ends are 0 as long as they could wrap
    sums = np.abs(np.arange(-total, total + 1))
    return float(min(1.0, distribution[sums >= abs(int(differences.sum()))].sum()))


def p_text(p_value: float) -> str:
    """`p = 0.0312`, `p < 0.0001`."""
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.4f}"


# An evaluation: N problems of n replicates each, [N, n].

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

    It says how far the number would move had other problems been drawn from the same distribution: `share_interval` for
    shares; rewards and lengths have Student's t, and of a single problem none.

    `reward_std_all` is the population standard deviation over all N * n rewards.
    """
    num_problems, replicates = table.rewards.shape
    metrics: dict[str, float] = {"tasks": float(num_problems), "replicates": float(replicates)}
    # Each metric for each problem, [N].
    num_correct = table.is_correct.sum(axis=1)
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
    # Their means, with intervals.
    means = np.stack([*columns.values()], axis=1).mean(axis=0)
    for (name, values), mean in zip(columns.items(), means, strict=True):
        metrics[name] = float(mean)
        if (is_share := name.startswith(SHARES)) or num_problems > 1:
            low, high = share_interval(values) if is_share else mean_interval(values)
            metrics |= {f"{name}_low": float(low), f"{name}_high": float(high)}
    # The spread of all rewards; centred, so that the second moment loses no digits to a large mean.
    centred = table.rewards - table.rewards.mean()
    first, second = np.stack([centred.mean(axis=1), (centred**2).mean(axis=1)], axis=1).mean(axis=0)
    metrics["reward_std_all"] = math.sqrt(max(float(second - first**2), 0.0))
    # With as many replicates for every problem, the mean over problems is that over completions; both names are in use.
    metrics["reward_mean_taskavg_all"] = metrics["reward_mean_all"]
    metrics["success_rate_taskavg_all"] = metrics["success_rate_all"]
    return metrics


def metric_names(ks: Sequence[int], replicates: int) -> list[str]:
    """The metrics of `metrics_with_intervals`, apart from counts and the ends of intervals."""
    no = np.zeros((1, replicates))
    names = metrics_with_intervals(ReplicateTable(no, no > 0, no > 0, no.astype(np.int64)), ks)
    return [name for name in names if name not in ("tasks", "replicates") and not name.endswith(("_low", "_high"))]
