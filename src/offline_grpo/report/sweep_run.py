"""One run of a sweep: its settings and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offline_grpo.errors import GrpoError
from offline_grpo.report.history import History, Series, load_history
from offline_grpo.report.run_files import changed_on_the_way, overrides_of, read_part, settings_of

NUMBER_COLUMNS = ("pass@1", "pass@1_low", "pass@1_high", "best_pass@1", "reward_mean", "minutes")  # of summary.csv


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A result that was not measured, or is not finite, is None.

    Args:
        overrides, settings: see `run_files`, with what was changed on the way; nothing where they cannot be read.
    """

    name: str
    overrides: dict[str, str]
    settings: dict[str, str]
    status: str
    pass_at_1: Series
    final_low: float | None
    final_high: float | None
    reward: float | None
    minutes: float | None

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def final_pass_at_1(self) -> float | None:
        return _last(self.pass_at_1.values)

    @property
    def best_pass_at_1(self) -> float | None:
        best = self.pass_at_1.best()
        return None if best is None else float(self.pass_at_1.values[best])

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The values of NUMBER_COLUMNS."""
        return (self.final_pass_at_1, self.final_low, self.final_high, self.best_pass_at_1, self.reward, self.minutes)


def read_run(run_dir: Path, name: str) -> SweepRun:
    """The run in a folder of a sweep.

    Raises:
        GrpoError: a file of it cannot be read.
    """
    return run_of(load_history(run_dir), name)


def read_or_say(run_dir: Path, name: str) -> SweepRun:
    """The same for a table. A run with a damaged file costs the others nothing: its status says what is wrong, and it
    has no results.
    """
    try:
        return read_run(run_dir, name)
    except GrpoError as error:
        return unreadable(run_dir, name, f"damaged: {error}", Series(np.empty(0), np.empty(0)))


def unreadable(run_dir: Path, name: str, status: str, pass_at_1: Series) -> SweepRun:
    """A run of which `run_of` cannot say more than this."""
    overrides, settings = _settings(run_dir, as_far_as_possible=True)
    return SweepRun(name, overrides, settings, status, pass_at_1, None, None, None, None)


def run_of(history: History, name: str) -> SweepRun:
    """The run whose metrics are read already.

    Raises:
        GrpoError: another file of it cannot be read.
    """
    run_dir = history.run_dir
    overrides, settings = _settings(run_dir)
    final_low, final_high = (_last(history.series("eval", f"pass@1_{end}").values) for end in ("low", "high"))
    _, seconds = history.phase_seconds()
    total_s = sum(
        float(values.sum()) for values in seconds.values()
    )  # without starts: the first run of a process waits for its imports
    num_done = max(history.train, default=-1) + 1
    last = [
        records.get(num_done - 1, {}) for records in (history.train, history.evals)
    ]  # of an evaluation that was owed, the latter
    stopped_early = num_done > 0 and any("stopped_early" in metrics for metrics in last)
    return SweepRun(
        name=name,
        overrides=overrides,
        settings=settings,
        status="done" if stopped_early else _status(run_dir, num_done),
        pass_at_1=history.series("eval", "pass@1"),
        final_low=final_low,
        final_high=final_high,
        reward=_last(history.series("train", "reward_mean").values),
        minutes=total_s / 60 if seconds and math.isfinite(total_s) else None,
    )


def _settings(run_dir: Path, *, as_far_as_possible: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Overrides and settings, see `SweepRun`.

    Raises:
        GrpoError: a file cannot be read, and not `as_far_as_possible`.
    """
    overrides, settings = dict[str, str](), dict[str, str]()
    with (
        suppress(GrpoError) if as_far_as_possible else nullcontext()
    ):  # told already, or one error of the run is enough
        overrides = overrides_of(run_dir)
        settings = settings_of(run_dir)
        changed = changed_on_the_way(run_dir, settings)
        overrides, settings = overrides | changed, settings | changed
    return overrides, settings


def _last(values: Sequence[float] | Any) -> float | None:
    return float(values[-1]) if len(values) and math.isfinite(values[-1]) else None


def _status(run_dir: Path, num_done: int) -> str:
    """`done`, `stopped at 3/10`, or `no metrics` for a run that never finished an iteration."""
    if num_done == 0:
        return "no metrics"
    wanted = read_part(run_dir / ".hydra" / "config.yaml", lambda config: int(config["train"]["iterations"]))
    return "done" if num_done >= wanted else f"stopped at {num_done}/{wanted}"
