"""Runs, and configurations: runs that differ in the seed alone, and means over them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offline_grpo.errors import ConfigError
from offline_grpo.eval.intervals import mean_interval
from offline_grpo.report.history import FloatArray, History, Series, by_number, load_history
from offline_grpo.report.run_files import WITHOUT_EFFECT, changes_of, overrides_of, read_yaml, settings_of
from offline_grpo.report.tables import Table, number, with_interval

NOT_COMPARED = ("seed", *WITHOUT_EFFECT)
"""Keys, and groups, that make no other configuration."""
EVALUATED = re.compile(
    r"task\.(?!.*(weights?|bonus|reward)$)"
    r"|eval\.(num_ids|ids|id_seed_start|replicates|temperature|top_p|top_k|min_p|repetition_penalty|max_new_tokens|stop)"
)
"""Keys that say what held-out problems are asked, and how: runs that differ in one are not ranked."""
RESULTS = ("pass@1 [95%]", "best", "reward", "minutes")
MIN_SEARCHED = 5  # values of a number, in a search
MIN_SEEDS = 3
"""Of a band around a curve: with two, Student's t has one degree of freedom, and the band hides all curves."""


@dataclass(frozen=True)
class Run:
    """A run with its results, which are None where they were not measured."""

    name: str
    history: History
    overrides: Mapping[str, str]  # see `run_files`, with what was changed on the way
    settings: Mapping[str, str]  # the same
    status: str  # `done`, `stopped at 3/10`, or `no metrics` for a run that never finished an iteration
    final_pass_at_1: float | None
    interval: tuple[float, float] | None  # 95% of that, over problems
    best_pass_at_1: float | None
    reward: float | None  # mean of the last iteration
    minutes: float | None

    @classmethod
    def of(
        cls, name: str, history: History, overrides: Mapping[str, str], settings: Mapping[str, str], status: str
    ) -> Run:
        low, high = (history.last("eval", f"pass@1_{end}") for end in ("low", "high"))
        return cls(
            *(name, history, overrides, settings, status),
            final_pass_at_1=history.last("eval", "pass@1"),
            interval=None if low is None or high is None else (low, high),
            best_pass_at_1=max(history.series("eval", "pass@1").values.tolist(), default=None),
            reward=history.last("train", "reward_mean"),
            minutes=history.total_s / 60 if history.train else None,
        )

    @property
    def is_done(self) -> bool:
        return self.status == "done"


def read_run(run_dir: Path, name: str) -> Run:
    """The run in a folder."""
    history = load_history(run_dir)
    # It is done after its last iteration, or where it stopped early, or if nobody knows how many it was to have.
    num_done, config = max(history.train, default=-1) + 1, run_dir / ".hydra" / "config.yaml"
    last = (records.get(num_done - 1, {}) for records in (history.train, history.evals))
    status = "done" if num_done else "no metrics"
    if num_done and config.is_file() and not any("stopped_early" in metrics for metrics in last):
        wanted = int(read_yaml(config)["train"]["iterations"])
        status = "done" if num_done >= wanted else f"stopped at {num_done}/{wanted}"
    if not (run_dir / ".hydra" / "overrides.yaml").is_file():
        return Run.of(name, history, {}, {}, status)
    changes = changes_of(run_dir)
    return Run.of(name, history, overrides_of(run_dir) | changes, settings_of(run_dir) | changes, status)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs, and the runs of sweeps, named by their place below a folder of all.

    Raises:
        ConfigError: a path has no run.
    """
    found: list[Path] = []
    for path in paths:
        inside = [file.parent.parent for file in path.rglob(".hydra/overrides.yaml")]
        of_path = [path] if (path / "metrics").is_dir() else sorted(inside, key=lambda folder: by_number(str(folder)))
        if not of_path:
            raise ConfigError(f"{path}: is neither a run (a folder with metrics/) nor a sweep (a folder of runs)")
        found += of_path
    # Each once, by its place below a folder of all.
    folders = list(dict.fromkeys(folder.resolve() for folder in found))
    base = os.path.commonpath([folder.parent for folder in folders])
    return [read_run(folder, os.path.relpath(folder, base)) for folder in folders]


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
        return [run for run in self.best_known if run.final_pass_at_1 is not None]

    def mean(self, name: str) -> float | None:
        """The mean of a result of `Run` over `best_known`; None where it was not measured."""
        values = [value for run in self.best_known if (value := getattr(run, name)) is not None]
        return sum(values) / len(values) if values else None

    @property
    def pass_at_1(self) -> float | None:
        """The mean of the last pass@1."""
        return self.mean("final_pass_at_1")

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% of the mean over seeds, or of one run over problems; None without a spread, or if a seed was repeated."""
        if len(self.counted) == 1:
            return self.counted[0].interval
        values = np.array([run.final_pass_at_1 for run in self.counted], dtype=np.float64)
        if len(set(values)) < 2 or not have_own_seeds(self.counted):
            return None
        low, high = share_interval(values[:, None])
        return float(low[0]), float(high[0])


def configurations(runs: Sequence[Run]) -> list[Configuration]:
    """Group runs by all settings but NOT_COMPARED. Those with one evaluation stand together, best pass@1 first;
    unfinished, then unmeasured ones last.
    """
    # Runs whose stored settings are equal are one configuration, whatever was typed.
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: by_number(run.name)):
        groups.setdefault(tuple(sorted(_compared(run.settings).items())), []).append(run)
    names = _names([chosen[0] for chosen in groups.values()])
    found = [Configuration(name, tuple(chosen)) for name, chosen in zip(names, groups.values(), strict=True)]
    evaluations = [each.evaluation for each in found]

    def rank(each: Configuration) -> tuple[int, bool, bool, float]:
        score = each.mean("reward") if each.pass_at_1 is None else each.pass_at_1
        is_unfinished = not any(run.is_done for run in each.runs)
        return evaluations.index(each.evaluation), each.pass_at_1 is None, is_unfinished, -(score or 0.0)

    return sorted(found, key=rank)


def configurations_table(found: Sequence[Configuration]) -> Table:
    """A row for each; runs that the means leave out are in parentheses."""
    rows = [
        [
            each.name,
            " ".join(run.name if run in each.best_known else f"({run.name})" for run in each.runs),
            *_results(each.pass_at_1, each.interval, *map(each.mean, ("best_pass_at_1", "reward", "minutes"))),
        ]
        for each in found
    ]
    return Table(["configuration", "runs", *RESULTS], rows)


def by_result(run: Run) -> tuple[bool, float, float]:
    return run.final_pass_at_1 is None, -(run.final_pass_at_1 or 0.0), -(run.reward or 0.0)


def runs_table(runs: Sequence[Run], keys: Sequence[str]) -> Table:
    """A row for each run with the values of these overrides or settings, best final pass@1 first."""
    rows = [
        [
            run.name,
            *(run.overrides.get(key, run.settings.get(key, "")) for key in keys),
            *_results(run.final_pass_at_1, run.interval, run.best_pass_at_1, run.reward, run.minutes),
            run.status,
        ]
        for run in sorted(runs, key=by_result)
    ]
    return Table(["run", *keys, *RESULTS, "status"], rows)


def _results(score: float | None, interval: tuple[float, float] | None, *others: float | None) -> list[str]:
    """Cells of RESULTS."""
    best, reward, minutes = others
    took = number(minutes, ".1f" if minutes is None or minutes >= 1 else ".2g")
    return [with_interval(score, interval), number(best), number(reward), took]


def same_seeds(one: Configuration, other: Configuration) -> list[tuple[Run, Run]]:
    """The runs of both that have a seed in common."""
    first, second = ({run.settings.get("seed"): run for run in each.counted} for each in (one, other))
    return [(run, second[seed]) for seed, run in first.items() if seed in second]


def _compared(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key.lstrip("+~").split(".")[0] not in NOT_COMPARED}


def _names(runs: Sequence[Run]) -> list[str]:
    """A name for the configuration of each of these runs: its overrides, without those that all have in common."""
    own = [_compared(run.overrides) for run in runs]
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
    return [
        f"{name} (as run {run.name})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
    ]


def have_own_seeds(runs: Sequence[Run]) -> bool:
    """Whether no seed was run twice: an interval over repetitions would be too narrow."""
    return len({run.settings.get("seed") for run in runs}) == len(runs)


def mean_curve(values: Sequence[Series]) -> tuple[FloatArray, FloatArray]:
    """Steps [R] at which all were measured, and the values there, [N, R]."""
    tables = [dict(zip(each.steps.tolist(), each.values.tolist(), strict=True)) for each in values]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values_at = [[table[step] for step in steps] for table in tables]
    return np.array(steps), np.array(values_at).reshape(len(tables), len(steps))


def share_interval(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`mean_interval` of shares over N >= 2 runs, [N, R] -> ([R], [R]), cut at 0 and 1."""
    low, high = mean_interval(values)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def searched(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each number in which runs differ, with its value `x` in and the final pass@1 `y` of each run; nothing unless one
    has more values than a grid.
    """
    measured, found = [run for run in runs if run.final_pass_at_1 is not None], []
    for key in {key: None for run in measured for key in run.overrides if key not in NOT_COMPARED}:
        texts = [run.overrides.get(key, "") for run in measured]
        if len(set(texts)) > 1 and all(re.fullmatch(r"\d+(\.\d*)?(e[-+]?\d+)?", text) for text in texts):
            scores = [run.final_pass_at_1 for run in measured]
            found.append({"key": key, "x": [*map(float, texts)], "y": scores, "runs": [run.name for run in measured]})
    return found if any(len(set(each["x"])) >= MIN_SEARCHED for each in found) else []
