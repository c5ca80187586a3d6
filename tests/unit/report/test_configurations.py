"""Runs that differ in the seed alone, against numbers worked out by hand and the density of Student's t."""

import math
from dataclasses import replace

import numpy as np
import pytest

from offline_grpo.report.configurations import Configuration, configurations, share_interval, t_975
from offline_grpo.report.history import Series
from offline_grpo.report.sweep_run import SweepRun


def run(
    name: str, overrides: dict[str, str], values: list[float], *, status: str = "done", reward: float | None = None
) -> SweepRun:
    steps = np.arange(len(values), dtype=np.float64) * 10
    return SweepRun(name, overrides, overrides, status, Series(steps, np.array(values)), None, None, reward, 2.0)


def test_runs_that_differ_in_the_seed_alone_are_one_configuration() -> None:
    runs = [
        run("10", {"train.lr": "1e-5", "seed": "1", "task": "sat"}, [0.2, 0.6], reward=0.5),
        run("2", {"seed": "0", "task": "sat", "train.lr": "1e-5"}, [0.2, 0.5], reward=0.25),
        run("1", {"train.lr": "1e-6", "seed": "1", "task": "sat"}, [0.2, 0.9]),
        run("0", {"train.lr": "2e-6", "seed": "1", "task": "sat", "resume": "auto"}, []),
    ]
    best, middle, unmeasured = configurations(runs)
    assert [each.overrides for each in (best, middle, unmeasured)] == [
        {"train.lr": "1e-6"},
        {"train.lr": "1e-5"},
        {"train.lr": "2e-6"},
    ]
    assert [each.name for each in middle.runs] == ["2", "10"]
    assert (middle.pass_at_1, middle.mean("reward"), middle.mean("minutes")) == (pytest.approx(0.55), 0.375, 2.0)
    half = 12.7062 * 0.05  # s = 0.1 / sqrt(2), s / sqrt(2) = 0.05
    assert (middle.low, middle.high) == (0.0, 1.0), f"0.55 +- {half:.2f}, cut"
    assert (best.low, best.high, unmeasured.pass_at_1) == (None, None, None)


def test_other_settings_are_another_configuration_whatever_was_typed() -> None:
    """The default of `lr` was 1 when run 0 was made, and 2 for the others; run 3 cannot be read."""
    typed: list[dict[str, str]] = [{"task": "sat"}, {"task": "sat"}, {"task": "sat", "train.lr": "2"}, {"task": "sat"}]
    stored = [{"task": "sat", "train.lr": lr, "seed": lr, "num_threads": lr} for lr in "122"] + [{}]
    stored[1] |= {"seed": "1", "train.new": "x"}
    stored[2] |= {"train.new": "x"}
    runs = [replace(run(str(i), typed[i], [0.5]), settings=stored[i]) for i in range(4)]
    found = configurations(runs)
    assert [(each.overrides, [run.name for run in each.runs]) for each in found] == [
        ({"train.lr": "1", "train.new": "null"}, ["0"]),
        ({"train.lr": "2", "train.new": "x"}, ["1", "2"]),
        ({"settings": "unknown"}, ["3"]),
    ]


def test_a_seed_that_was_typed_once_is_the_same_seed() -> None:
    runs = [replace(run(str(i), {"seed": "0"} if i else {}, [0.5 + i / 10]), settings={"seed": "0"}) for i in range(2)]
    [found] = configurations(runs)
    assert found.low is None


def test_unfinished_runs_do_not_count_beside_finished_ones() -> None:
    finished = [run(str(i), {"seed": str(i)}, [0.2, value]) for i, value in enumerate((0.5, 0.7))]
    [found] = configurations([*finished, run("2", {"seed": "2"}, [0.1], status="stopped at 1/2")])
    assert (len(found.runs), found.pass_at_1) == (3, pytest.approx(0.6))
    steps, values, mean = found.curve()
    assert (steps.tolist(), values.shape, mean.tolist()) == ([0, 10], (2, 2), pytest.approx([0.2, 0.6]))
    alone = Configuration({}, (run("2", {}, [0.1], status="stopped at 1/2"),))
    assert alone.pass_at_1 == 0.1, "better than nothing, and the status is told"


def test_unfinished_configurations_come_after_finished_ones() -> None:
    first, second = configurations([run("0", {"a": "1"}, [0.9], status="stopped at 1/2"), run("1", {"a": "2"}, [0.2])])
    assert (first.pass_at_1, second.pass_at_1) == (0.2, 0.9)


def test_equal_configurations_are_in_the_order_of_their_runs() -> None:
    runs = [run(name, {"a": name}, [0.5]) for name in ("10", "9", "2")]
    assert [each.runs[0].name for each in configurations(runs)] == ["2", "9", "10"]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 9, 19, 100])
def test_the_quantile_of_students_t(freedom: int) -> None:
    """Between minus and plus it lie 95% of the density, integrated numerically."""
    scale = (
        math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        if freedom < 100
        else None
    )
    if scale is None:
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    x = np.linspace(-t_975(freedom), t_975(freedom), 200_001)
    density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    assert float(np.trapezoid(density, x)) == pytest.approx(0.95, abs=3e-4)


def test_the_interval_covers_the_true_mean_in_95_of_100_sweeps() -> None:
    draws = np.random.default_rng(0).normal(0.5, 0.02, size=(4, 20_000))
    low, high = share_interval(draws)
    assert float(((low <= 0.5) & (high >= 0.5)).mean()) == pytest.approx(0.95, abs=0.005)
