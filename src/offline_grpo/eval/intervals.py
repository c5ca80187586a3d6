"""95% intervals of means over problems and over seeds, and Student's t. `tests/unit/eval/test_intervals.py` simulates
how often they hold the true value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
