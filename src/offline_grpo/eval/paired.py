"""Which of two models is better on the same problems: difference of success rates, interval, exact test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offline_grpo.eval.intervals import OF_DIFFERENCES, FloatArray, share_interval


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


def compare(first: NDArray[np.int64], second: NDArray[np.int64], replicates: int) -> PairedResult:
    """Compare success rates problem by problem.

    Interval (see `intervals.py`) and p-value are about these two models, on problems like these; of the settings that
    trained them they say nothing, because another seed makes other models. The p-value is that of Fisher's
    randomisation test for pairs (The Design of Experiments, 1935, section 21): were the models alike, each problem's
    difference would be as likely with the other sign. With one replicate that is the exact sign test (McNemar's).

    Args:
        first, second: right answers of each problem, [N], out of `replicates`.
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
