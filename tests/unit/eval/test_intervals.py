"""How often 95% intervals hold the true value, and how often equal things differ at p < 0.05: by the binomial
distribution, and simulated with fixed seeds. docs/numerics.md has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from offline_grpo.eval.intervals import (
    OF_DIFFERENCES,
    FloatArray,
    mean_interval,
    share_interval,
    t_975,
    t_p_value,
    t_tails,
)
from offline_grpo.eval.pass_at_k import pass_at_k

SIZES = (16, 64, 256)
NOMINAL = 0.93  # the least coverage that counts as 95%


@pytest.mark.parametrize("freedom", [1, 2, 5, 8])
def test_the_tails_of_students_t(freedom: int) -> None:
    """What is left beside the density between minus and plus, integrated numerically."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for value, tails in ((t_975(freedom), 0.05), (0.7, t_tails(0.7, freedom))):
        x = np.linspace(-value, value, 20_001)
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert float(np.trapezoid(density, x)) == pytest.approx(1 - tails, abs=1e-6)


@pytest.mark.parametrize("size", [*SIZES, 35, 128])
def test_one_sample_of_each_problem(size: int) -> None:
    """Exactly, for every share from 0.02 to 0.98; one problem or none solved has a width, too."""
    solved = np.arange(size + 1)
    low, high = share_interval((np.arange(size)[:, None] < solved).astype(float))  # [size + 1]
    shares = np.linspace(0.02, 0.98, 97)[:, None]
    log_ways = [math.lgamma(size + 1) - math.lgamma(i + 1) - math.lgamma(size - i + 1) for i in solved]
    chances = np.exp(np.array(log_ways) + solved * np.log(shares) + (size - solved) * np.log(1 - shares))
    coverage = (chances * ((low <= shares) & (shares <= high))).sum(1)
    assert coverage.min() > NOMINAL
    assert (low[0], high[-1]) == (0, 1)
    assert high[0] == pytest.approx(1 - low[-1])
    assert 3 / size < high[0] < 5.5 / size, "the rule of three, and a little more"


def populations(p: float, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[tuple[str, FloatArray, float]]:
    """The chance that the model solves each problem, of mean p, and that four tries of a random problem fail."""
    yield "all equal", np.full(shape, p), (1 - p) ** 4
    yield "Beta", rng.beta(p, 1 - p, shape), math.prod((1 - p + i) / (1 + i) for i in range(4))
    yield "all or nothing", (rng.random(shape) < p).astype(float), 1 - p
    if p < 0.9:
        reached = np.where(rng.random(shape) < 0.9, p / 0.9, 0.0)
        yield "a tenth out of reach", reached, 0.1 + 0.9 * (1 - p / 0.9) ** 4


def coverages(size: int, rounds: int, seed: int) -> dict[tuple[str, str, float], float]:
    """With four samples of each problem: (population, what is measured, its true value) -> how often the interval holds
    that. In differences, the second model differs from the first on every other problem, or is as good on all.
    """
    rng = np.random.default_rng(seed)
    found = {}

    def hold(name: str, what: str, truth: float, ends: tuple[FloatArray, FloatArray]) -> None:
        if what.startswith("difference") or 0.02 <= truth <= 0.98:
            found[name, what, truth] = float(((ends[0] <= truth) & (truth <= ends[1])).mean())

    for p in (0.02, 0.1, 0.5, 0.98):
        others = populations(min(p + 0.1, 0.95), (size, rounds), rng)
        for (name, chances, all_fail), (_, other, _) in zip(populations(p, (size, rounds), rng), others, strict=False):
            solved = rng.binomial(4, chances)
            hold(name, "pass@1", p, share_interval(pass_at_k(solved, 4, 1)))
            hold(name, "pass@4", 1 - all_fail, share_interval(pass_at_k(solved, 4, 4)))
            other[::2] = chances[::2]
            for second, truth in ((chances, 0.0), (other, (min(p + 0.1, 0.95) - p) / 2)):
                ends = share_interval((rng.binomial(4, second) - solved) / 4, OF_DIFFERENCES)
                hold(name, f"difference at {p}", truth, ends)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_several_samples_and_differences(size: int) -> None:
    found = coverages(size, 300, seed=0)
    assert len(found) > 40
    assert {case: share for case, share in found.items() if share < NOMINAL - 0.02} == {}


def false_positives(
    num_seeds: int, rounds: int, spread: float, rng: np.random.Generator
) -> tuple[FloatArray, list[float]]:
    """Two equal configurations whose runs differ by `spread` in pass@1, on 64 problems with four samples: differences
    by seed [S, rounds], and p-values over seeds."""
    chances = rng.beta(1, 1, (64, 1, 1, rounds))
    of_runs = np.clip(chances + rng.normal(0, spread, (1, 2, num_seeds, rounds)), 0, 1)
    first, second = rng.binomial(4, of_runs).mean(0) / 4  # [S, rounds] each
    differences = second - first
    return differences, [t_p_value(column) for column in differences.T]


@pytest.mark.parametrize(("num_seeds", "spread"), [(3, 0.05), (5, 0.02)])
def test_equal_configurations_differ_in_five_percent_of_tests_over_seeds(num_seeds: int, spread: float) -> None:
    rng = np.random.default_rng(0)
    differences, p_values = false_positives(num_seeds, 400, spread, rng)
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.025)
    low, high = mean_interval(differences)
    assert [p < 0.05 for p in p_values] == ((low > 0) | (high < 0)).tolist(), "the test and the interval agree"
