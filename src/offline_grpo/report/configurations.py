"""The configurations of a sweep: runs that differ in the seed alone, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offline_grpo.report.history import FloatArray, by_number
from offline_grpo.report.run_files import WITHOUT_EFFECT
from offline_grpo.report.sweep_run import SweepRun

NOT_COMPARED = ("seed", *WITHOUT_EFFECT)
"""Keys, and groups, that make no other configuration."""
MIN_SEEDS = 3
"""Of a band around a curve: with two, Student's t has one degree of freedom, and the band hides all curves."""


@dataclass(frozen=True)
class Configuration:
    """Runs with the same settings but for the seed.

    Args:
        overrides: those in which the sweep's configurations differ, all of them where there is only one; of
            configurations with the same overrides, the settings in which these differ.
        runs: sorted by name.
    """

    overrides: dict[str, str]
    runs: tuple[SweepRun, ...]

    @property
    def best_known(self) -> list[SweepRun]:
        """The runs that means are over: those that are done, or all where none is."""
        return [run for run in self.runs if run.is_done] or list(self.runs)

    @property
    def left_out(self) -> list[SweepRun]:
        """The runs that means are not over."""
        return [run for run in self.runs if run not in self.best_known]

    @property
    def counted(self) -> list[SweepRun]:
        """Those of which pass@1 was measured."""
        return [run for run in self.best_known if run.final_pass_at_1 is not None]

    def mean(self, name: str) -> float | None:
        """The mean of a result of SweepRun over `best_known`; None where it was not measured."""
        values = [value for run in self.best_known if (value := getattr(run, name)) is not None]
        return sum(values) / len(values) if values else None

    @property
    def pass_at_1(self) -> float | None:
        """The mean of the last pass@1."""
        return self.mean("final_pass_at_1")

    @property
    def low(self) -> float | None:
        """Lower end of its interval; None with one run, without a spread to estimate it from, or if a seed was run
        twice.
        """
        return self._bound(0)

    @property
    def high(self) -> float | None:
        """Upper end of its interval; None where `low` is."""
        return self._bound(1)

    def _bound(self, end: int) -> float | None:
        values = np.array([run.final_pass_at_1 for run in self.counted], dtype=np.float64)
        if len(set(values)) < 2 or not have_own_seeds(self.counted):
            return None
        return float(share_interval(values[:, None])[end][0])

    def curve(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Completed iterations [R], pass@1 of the runs there [N, R], and its mean [R], where all counted runs were
        evaluated.
        """
        tables = [
            dict(zip(run.pass_at_1.steps.tolist(), run.pass_at_1.values.tolist(), strict=True)) for run in self.counted
        ]
        steps = sorted(set.intersection(*map(set, tables))) if tables else []
        values = np.array([[table[step] for step in steps] for table in tables], dtype=np.float64).reshape(
            len(tables), len(steps)
        )
        return np.array(steps, dtype=np.float64), values, values.mean(0) if tables else np.zeros(0)


def configurations(runs: Sequence[SweepRun]) -> list[Configuration]:
    """Group runs by all settings except NOT_COMPARED: best mean pass@1 first, of equal ones that of the lower
    number, then unfinished ones. Those of which pass@1 was not measured come last, best reward first.
    """
    groups: dict[tuple[tuple[str, str], ...], list[SweepRun]] = {}
    for run in sorted(runs, key=lambda run: by_number(run.name)):
        groups.setdefault(tuple(sorted(_compared(run.settings or run.overrides).items())), []).append(run)
    names = _told_apart([chosen[0] for chosen in groups.values()])
    found = [Configuration(name, tuple(chosen)) for name, chosen in zip(names, groups.values(), strict=True)]

    def rank(each: Configuration) -> tuple[bool, bool, float]:
        is_unmeasured = each.pass_at_1 is None
        return (
            is_unmeasured,
            not any(run.is_done for run in each.runs),
            -((each.mean("reward") if is_unmeasured else each.pass_at_1) or 0.0),
        )

    return sorted(found, key=rank)


def _compared(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key.lstrip("+~").split(".")[0] not in NOT_COMPARED}


def _told_apart(runs: Sequence[SweepRun]) -> list[dict[str, str]]:
    """See `Configuration.overrides`, for a run of each: a default in `conf/` may have changed between them."""
    own = [_compared(run.overrides) for run in runs]
    shared = set.intersection(*(set(each.items()) for each in own)) if len(own) > 1 else set()
    found = []
    for run, overrides in zip(runs, own, strict=True):
        alike = [
            _compared(other.settings)
            for other, theirs in zip(runs, own, strict=True)
            if theirs == overrides and other.settings
        ]
        differing = (
            key
            for key in dict.fromkeys(key for each in alike for key in each)
            if len({each.get(key) for each in alike}) > 1
        )
        further = (
            {key: run.settings.get(key, "null") for key in differing}
            if run.settings
            else {"settings": "unknown"}
            if alike
            else {}
        )
        found.append({key: value for key, value in overrides.items() if (key, value) not in shared} | further)
    return found


def short_overrides(found: Sequence[Configuration]) -> list[dict[str, str]]:
    """The overrides of each, with keys by their last part (`lr` for `train.lr`) where that is one key's alone."""
    keys = list(dict.fromkeys(key for each in found for key in each.overrides))
    leaves = [key.rpartition(".")[2] for key in keys]
    names = {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves, strict=True)}
    return [{names[key]: value for key, value in each.overrides.items()} for each in found]


def have_own_seeds(runs: Sequence[SweepRun]) -> bool:
    """Whether no seed was run twice. Repetitions say nothing about other seeds: an interval over them would be too
    narrow.
    """
    return len({run.settings.get("seed") for run in runs}) == len(runs)


def share_interval(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """95% interval of the mean of shares over N >= 2 runs, [N, R] -> ([R], [R]): mean ± t * s / sqrt(N), cut at 0 and
    1.

    Student's t with N - 1 degrees of freedom, because the spread is estimated from few runs (Student 1908, "The
    probable error of a mean"). A bootstrap over two or three values has too few different resamples, and is too narrow.
    """
    low, high = mean_interval(values)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def mean_interval(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same of any metric."""
    count = len(values)
    half = t_975(count - 1) * values.std(0, ddof=1) / math.sqrt(count)
    return values.mean(0) - half, values.mean(0) + half


def t_975(freedom: int) -> float:
    """The 97.5% quantile of Student's t: from tables up to 4 degrees of freedom, then by the series of Abramowitz &
    Stegun 26.7.5.
    """
    if freedom <= 4:
        return (12.7062, 4.3027, 3.1824, 2.7764)[freedom - 1]
    z = 1.959964
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))
