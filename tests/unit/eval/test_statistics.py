"""The estimators against hand-computed numbers and brute force over all subsets; the paired test against counting all
signs, and against the binomial distribution. How often 95% intervals hold the true value, and how often equal things
differ at p < 0.05: by the binomial distribution, and simulated with fixed seeds. docs/numerics.md has the numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import pstdev

import numpy as np
import pytest

from offline_grpo.eval.statistics import (
    OF_DIFFERENCES,
    FloatArray,
    ReplicateTable,
    compare,
    mean_interval,
    metrics_with_intervals,
    pass_at_k,
    share_interval,
    sign_flip_p_value,
    t_975,
    t_p_value,
    t_tails,
)

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


@pytest.mark.parametrize("seed", range(2))
def test_p_value_is_the_share_of_all_signs(seed: int) -> None:
    differences = np.random.default_rng(seed).integers(-4, 5, size=10)
    seen = abs(int(differences.sum()))
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, differences.tolist(), strict=True)))
        for signs in itertools.product((-1, 1), repeat=10)
    ]
    assert sign_flip_p_value(differences) == pytest.approx(sum(total >= seen for total in sums) / 2**10)


@pytest.mark.parametrize(("better", "worse"), [(9, 1), (300, 250), (5, 5)])
def test_with_one_replicate_it_is_the_sign_test(better: int, worse: int) -> None:
    n, k = better + worse, max(better, worse)
    binomial = min(1.0, 2 * sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n)
    differences = np.array([1] * better + [-1] * worse + [0] * 17)
    assert sign_flip_p_value(differences) == pytest.approx(binomial, rel=1e-9)


def test_a_comparison_of_two_models() -> None:
    first, second = np.array([0, 1, 2, 4]), np.array([4, 1, 1, 4])
    found = compare(first, second, 4)
    assert (found.difference, found.num_better, found.num_worse, found.num_problems) == (3 / 16, 1, 1, 4)
    assert found.low < found.difference < found.high
    assert compare(second, first, 4).difference == -3 / 16
    alike = compare(first, first, 4)
    assert (alike.difference, alike.p_value) == (0.0, 1.0)
    assert alike.low < 0 < alike.high, "four problems say little"


@pytest.mark.parametrize("replicates", [1, 6])
def test_agrees_with_the_share_of_subsets_that_hold_a_right_answer(replicates: int) -> None:
    for num_correct in range(replicates + 1):
        answers = [True] * num_correct + [False] * (replicates - num_correct)
        for k in range(1, replicates + 1):
            subsets = list(itertools.combinations(answers, k))
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
