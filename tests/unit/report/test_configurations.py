"""Runs that differ in the seed alone, against numbers worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from offline_grpo.report.configurations import configurations, mean_curve
from offline_grpo.report.runs import Run, Series


def run(
    name: str,
    overrides: dict[str, str],
    values: list[float],
    *,
    settings: dict[str, str] | None = None,
    status: str = "done",
    reward: float | None = None,
) -> Run:
    train = {} if reward is None else {0: {"reward_mean": reward, "time/train_s": 120.0}}
    evals = {10 * i - 1: {"pass@1": v, "pass@1_low": v - 0.1, "pass@1_high": v + 0.1} for i, v in enumerate(values)}
    found = Run(Path(name), train, evals, name)
    # What Hydra's files would say.
    vars(found).update(overrides=overrides, settings=overrides if settings is None else settings, status=status)
    return found


def test_runs_that_differ_in_the_seed_alone_are_one_configuration() -> None:
    runs = [
        run("10", {"train.lr": "1e-5", "seed": "1", "task": "sat"}, [0.2, 0.6], reward=0.5),
        run("2", {"seed": "0", "task": "sat", "train.lr": "1e-5"}, [0.2, 0.5], reward=0.25),
        run("1", {"train.lr": "1e-6", "seed": "1", "task": "sat"}, [0.2, 0.9]),
        run("0", {"train.lr": "2e-6", "seed": "1", "task": "sat", "resume": "auto"}, []),
    ]
    best, middle, unmeasured = found = configurations(runs)
    assert [each.name for each in found] == ["lr=1e-6", "lr=1e-5", "lr=2e-6"]
    assert [each.name for each in middle.runs] == ["2", "10"]
    assert (middle.pass_at_1, middle.mean("reward"), middle.mean("minutes")) == (pytest.approx(0.55), 0.375, 2.0)
    half = 12.7062 * 0.05  # s = 0.1 / sqrt(2), s / sqrt(2) = 0.05
    assert middle.interval == (0.0, 1.0), f"0.55 +- {half:.2f}, cut"
    assert best.interval == pytest.approx((0.8, 1.0)), "of one run, over its problems"
    assert (unmeasured.pass_at_1, unmeasured.interval) == (None, None)


def test_other_settings_are_another_configuration_whatever_was_typed() -> None:
    """The default of `lr` was 1 when run 0 was made, and 2 for the others; each had a server at another address."""
    typed: list[dict[str, str]] = [{"task": "sat"}, {"task": "sat"}, {"task": "sat", "train.lr": "2"}]
    stored = [{"task": "sat", "train.lr": lr, "seed": lr, "num_threads": lr} for lr in "122"]
    stored = [{**stored[i], "generation.base_url": f"[http://127.0.0.1:{i}]"} for i in range(3)]
    found = configurations([run(str(i), typed[i], [0.5], settings=stored[i]) for i in range(3)])
    assert [[run.name for run in each.runs] for each in found] == [["0"], ["1", "2"]]
    assert [each.name for each in found] == ["all alike (as run 0)", "all alike (as run 1)"]


def test_unfinished_runs_do_not_count_beside_finished_ones() -> None:
    finished = [run(str(i), {"seed": str(i)}, [0.2, value]) for i, value in enumerate((0.5, 0.7))]
    [found] = configurations([*finished, run("2", {"seed": "2"}, [0.1], status="stopped at 1/2")])
    assert (len(found.runs), found.pass_at_1) == (3, pytest.approx(0.6))
    steps, values = mean_curve([each.series("eval/pass@1") for each in found.counted])
    assert (steps.tolist(), values.tolist()) == ([0, 10], [[0.2, 0.5], [0.2, 0.7]])


def test_runs_without_a_common_step_have_no_mean_curve():
    apart = [Series(np.array([step]), np.array([0.5])) for step in (1, 2)]
    assert [part.shape for part in mean_curve(apart)] == [(0,), (2, 0)]
