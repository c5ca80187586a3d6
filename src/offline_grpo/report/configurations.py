"""Configurations: runs that differ in the seed alone, means over them, and differences between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offline_grpo.eval.statistics import mean_interval
from offline_grpo.report.runs import OF_ADDRESS, WITHOUT_EFFECT, FloatArray, Run, Series, by_number

NOT_COMPARED = {"seed", *OF_ADDRESS, *WITHOUT_EFFECT}
"""Keys, and groups, that make no other configuration."""
EVALUATED = re.compile(
    r"task\.(?!.*(weights?|bonus|reward)$)"
    r"|eval\.(num_ids|ids|id_seed_start|replicates|temperature|top_p|top_k|min_p|repetition_penalty|max_new_tokens|stop)"
)
"""Keys that say what held-out problems are asked, and how: runs that differ in one are not ranked."""
MIN_SEARCHED = 5  # values of a number, in a search
MIN_SEEDS = 3
"""Of a band around a curve: with two, Student's t has one degree of freedom, and the band hides all curves."""


@dataclass(frozen=True)
class Configuration:
    """Runs with the same settings but for the seed, sorted by name. The configuration's own name, such as
    `lr=1e-5, kl_coef=0.1`, has the overrides in which the configurations differ.
    """

    name: str
    runs: Sequence[Run]

    @property
    def evaluation(self) -> list[tuple[str, str]]:
        """What pass@1 is measured on."""
        return sorted((key, value) for key, value in self.runs[0].settings.items() if EVALUATED.match(key))

    @property
    def best_known(self) -> list[Run]:
        """The runs that means are over: those that are done, or all where none is."""
        return [run for run in self.runs if run.is_done] or list(self.runs)

    @property
    def counted(self) -> list[Run]:
        """Those of which pass@1 was measured."""
        return [run for run in self.best_known if run.pass_at_1 is not None]

    def mean(self, name: str) -> float | None:
        """The mean of a result of `Run` over `best_known`; None where it was not measured."""
        values = [value for run in self.best_known if (value := getattr(run, name)) is not None]
        return sum(values) / len(values) if values else None

    @property
    def pass_at_1(self) -> float | None:
        """The mean of the last pass@1."""
        return self.mean("pass_at_1")

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% of the mean over seeds, cut at 0 and 1, or of one run over problems; None without a spread, or if a seed
        was repeated.
        """
        if len(self.counted) == 1:
            return self.counted[0].interval
        values = np.array([run.pass_at_1 for run in self.counted], dtype=np.float64)
        if len(set(values)) < 2 or not have_own_seeds(self.counted):
            return None
        low, high = mean_interval(values)
        return max(float(low), 0.0), min(float(high), 1.0)


def configurations(runs: Sequence[Run]) -> list[Configuration]:
    """Group runs by all settings but NOT_COMPARED. Those with one evaluation stand together, best pass@1 first;
    unfinished, then unmeasured ones last.
    """
    # Runs whose stored settings are equal are one configuration, whatever was typed.
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: by_number(run.name)):
        groups.setdefault(tuple(sorted(_compared(run.settings).items())), []).append(run)
    # The name of each: the overrides of its first run, without those that all have in common.
    own = [_compared(chosen[0].overrides) for chosen in groups.values()]
    common = set.intersection(*(set(each.items()) for each in own)) if len(own) > 1 else set()
    differing = [{key: value for key, value in each.items() if (key, value) not in common} for each in own]
    # Keys are shortened to their last part, `lr` of `train.lr`, where that is one key's alone.
    leaf = {key: re.split("[./]", key)[-1] for each in differing for key in each}
    shared = Counter(leaf.values())
    names = []
    for each in differing:
        # Numbers that a search drew have four digits.
        drawn = re.compile(r"\d\.\d{4,}(e-?\d+)?|0\.\d{6,}").fullmatch
        values = {key: f"{float(value):.4g}" if drawn(value) else value for key, value in each.items()}
        words = (f"{leaf[key] if shared[leaf[key]] == 1 else key}={value}" for key, value in values.items())
        names.append(", ".join(words) or "all alike")
    # A name that two would share gets the run's.
    found = [
        Configuration(f"{name} (as run {chosen[0].name})" if names.count(name) > 1 else name, tuple(chosen))
        for name, chosen in zip(names, groups.values(), strict=True)
    ]
    evaluations = [each.evaluation for each in found]

    def rank(each: Configuration) -> tuple[int, bool, bool, float]:
        score = each.mean("reward") if each.pass_at_1 is None else each.pass_at_1
        is_unfinished = not any(run.is_done for run in each.runs)
        return evaluations.index(each.evaluation), each.pass_at_1 is None, is_unfinished, -(score or 0.0)

    return sorted(found, key=rank)


def _compared(settings: Mapping[str, str]) -> dict[str, str]:
    names = {key: key.lstrip("+~") for key in settings}
    return {key: settings[key] for key, name in names.items() if not NOT_COMPARED & {name, name.split(".")[0]}}


def have_own_seeds(runs: Sequence[Run]) -> bool:
    """Whether no seed was run twice: an interval over repetitions would be too narrow."""
    return len({run.settings.get("seed") for run in runs}) == len(runs)


def mean_curve(values: Sequence[Series]) -> tuple[FloatArray, FloatArray]:
    """Steps [R] at which all were measured, and the values there, [N, R]."""
    tables = [dict(zip(each.steps.tolist(), each.values.tolist(), strict=True)) for each in values]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values_at = [[table[step] for step in steps] for table in tables]
    return np.array(steps), np.array(values_at).reshape(len(tables), len(steps))


def searched(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each number in which runs differ, with its value `x` in and the final pass@1 `y` of each run; nothing unless one
    has more values than a grid.
    """
    measured, found = [run for run in runs if run.pass_at_1 is not None], []
    for key in {key: None for run in measured for key in run.overrides if key not in NOT_COMPARED}:
        texts = [run.overrides.get(key, "") for run in measured]
        if len(set(texts)) > 1 and all(re.fullmatch(r"\d+(\.\d*)?(e[-+]?\d+)?", text) for text in texts):
            scores = [run.pass_at_1 for run in measured]
            found.append({"key": key, "x": [*map(float, texts)], "y": scores, "runs": [run.name for run in measured]})
    return found if any(len(set(each["x"])) >= MIN_SEARCHED for each in found) else []
