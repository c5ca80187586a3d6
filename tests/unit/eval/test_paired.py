"""The paired test against counting all signs, and against the binomial distribution."""

import itertools
import math

import numpy as np
import pytest

from offline_grpo.eval.paired import compare, sign_flip_p_value


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
