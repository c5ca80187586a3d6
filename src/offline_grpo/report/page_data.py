"""The numbers of a page: runs, curves thinned to what a screen shows, paired differences. What cannot be read is named,
and left out.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offline_grpo.errors import ConfigError, GrpoError, reason_of
from offline_grpo.eval.paired import PairedResult, compare
from offline_grpo.redaction import flat, redacted
from offline_grpo.report.configurations import MIN_SEEDS, Configuration, have_own_seeds, mean_interval
from offline_grpo.report.history import PHASES, FloatArray, History, Series, by_number, load_history
from offline_grpo.report.page_samples import Solved
from offline_grpo.report.run_files import read_yaml
from offline_grpo.report.style import smooth
from offline_grpo.report.sweep_run import SweepRun, run_of, unreadable

WRONG_FILE = (GrpoError, LookupError, TypeError, ValueError, AttributeError, OSError)
"""What reading a file raises that somebody else has written."""
MAX_VALUE = 200  # letters of a setting
MAX_POINTS, MAX_POINTS_IN_ALL = 300, 6000  # of a curve, and of the curves of a metric over all runs
BOOTSTRAP_SAMPLES = 1000
MEMORY = ("gpu_memory", "gpu_memory_reserved", "gpu_memory_card")
PAIRED_COLUMNS = ("configuration", "difference", "95% over problems", "p", "better on", "worse on", "95% over seeds")


@dataclass(frozen=True)
class PageRun:
    """`settings`: `{"train.lr": "1e-6", "task": "sat", ...}`, values, and the options that groups were set to."""

    result: SweepRun
    history: History
    settings: dict[str, str]


def load_runs(paths: Sequence[Path], damaged: list[str]) -> dict[str, PageRun]:
    """Runs, and the runs of sweeps, by name. `damaged` takes what is wrong with files that cannot be read."""
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _folders(path)))
    base = os.path.commonpath([folder.parent for folder in folders])
    found = {}
    for folder in folders:
        name, history = os.path.relpath(folder, base), load_history(folder, damaged)
        try:
            found[name] = PageRun(run_of(history, name), history, _settings(folder / ".hydra"))
        except WRONG_FILE as error:
            damaged.append(f"{folder / '.hydra'}: settings cannot be read ({reason_of(error)})")
            found[name] = PageRun(
                unreadable(folder, name, "settings unknown", history.series("eval", "pass@1")), history, {}
            )
    return found


def _folders(path: Path) -> list[Path]:
    if (path / "metrics").is_dir():
        return [path]
    found = sorted(
        (file.parent.parent for file in path.rglob(".hydra/overrides.yaml")), key=lambda each: by_number(str(each))
    )
    if not found:
        raise ConfigError(f"{path}: is neither a run (a folder with metrics/) nor a sweep (a folder of runs)")
    return found


def _settings(folder: Path) -> dict[str, str]:
    choices = read_yaml(folder / "hydra.yaml")["hydra"]["runtime"]["choices"]
    chosen = {str(group): str(option) for group, option in choices.items() if not str(group).startswith("hydra/")}
    return chosen | {
        key: str(value)[:MAX_VALUE]
        for key, value in flat(redacted(read_yaml(folder / "config.yaml"))).items()
        if key != "resume"
    }


def all_curves(groups: Sequence[Configuration], runs: Mapping[str, PageRun]) -> dict[str, list[dict[str, Any]]]:
    """`train/KEY` or `eval/KEY` -> a curve for each configuration that has the metric, and in it those of its runs."""
    points = max(40, min(MAX_POINTS, MAX_POINTS_IN_ALL // len(runs)))
    histories = [run.history for run in runs.values()]
    keys = {("eval", key) for history in histories for metrics in history.evals.values() for key in metrics}
    keys |= {("train", key) for history in histories for metrics in history.train.values() for key in metrics}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, key in sorted(keys - {(name, f"{key}_{end}") for name, key in keys for end in ("low", "high")}):
        for number, group in enumerate(groups):
            series = {r.name: each for r in group.runs if len(each := finite(runs[r.name].history.series(name, key)))}
            if series:
                counted = [run for run in group.best_known if run.name in series]
                ends = (
                    [finite(runs[counted[0].name].history.series(name, f"{key}_{end}")) for end in ("low", "high")]
                    if counted
                    else []
                )
                curve = _curve([series[run.name] for run in counted], ends, points, has_band=have_own_seeds(counted))
                singles = [
                    {"run": run} | _thinned(each.steps, each.values, points=points) for run, each in series.items()
                ]
                found.setdefault(f"{name}/{key}", []).append({"group": number, "runs": singles} | curve)
    return found


def _curve(counted: Sequence[Series], ends: Sequence[Series], points: int, *, has_band: bool) -> dict[str, list[float]]:
    """Mean and interval over runs, of running means where there are many iterations; of one run, the interval that it
    recorded.

    Args:
        has_band: whether several runs have an interval.
    """
    tables = [dict(zip(each.steps.tolist(), smooth(each.values).tolist(), strict=True)) for each in counted]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    if not steps:
        return {}
    values = np.array([[table[step] for step in steps] for table in tables])  # [N, R]
    recorded = [smooth(end.values) for end in ends if len(end) == len(steps)] if len(tables) == 1 else []
    bounds = mean_interval(values) if len(tables) >= MIN_SEEDS and has_band else recorded
    return _thinned(np.array(steps), values.mean(0), *bounds, points=points)


def all_parts(groups: Sequence[Configuration], runs: Mapping[str, PageRun]) -> dict[str, dict[str, Any]]:
    """Seconds per iteration by phase, and gigabytes of GPU memory by who counts them: name -> parts -> `y`.

    Of one run over its iterations `x`, in means over stretches of them; of several runs the mean of each configuration.
    """
    found = {}
    for name, part_of in (("phases", _seconds), ("memory", _gigabytes)):
        tables = {run: part_of(runs[run].history) for run in runs}
        parts = list(dict.fromkeys(part for table in tables.values() for part, values in table.items() if values.any()))
        if len(runs) == 1:
            [table] = tables.values()
            steps = np.array([step + 1 for step in next(iter(runs.values())).history.train], dtype=np.float64)
            stretches = np.array_split(np.arange(len(steps)), min(MAX_POINTS, len(steps))) if len(steps) else []
            x = [float(f"{steps[stretch].mean():.5g}") for stretch in stretches]
            y = {part: [_mean(table[part][stretch]) for stretch in stretches] for part in parts}
            found[name] = {"x": x, "y": y}
        else:
            counted = [[tables[run.name] for run in group.best_known if tables[run.name]] for group in groups]
            y = {
                part: [_mean(np.concatenate([t[part] for t in each if part in t] or [[]])) for each in counted]
                for part in parts
            }
            found[name] = {"x": None, "y": y}
    return found


def _seconds(history: History) -> dict[str, FloatArray]:
    seconds = history.phase_seconds()[1]
    return {phase: seconds.get(phase, np.zeros(len(history.train))) for phase in PHASES} if seconds else {}


def _gigabytes(history: History) -> dict[str, FloatArray]:
    found = {
        part: np.array([metrics.get(f"perf/{part}_gb", math.nan) for metrics in history.train.values()])
        for part in MEMORY
    }
    return {part: values for part, values in found.items() if np.isfinite(values).any()}


def _mean(values: FloatArray) -> float:
    """To five digits; NaN where nothing was measured."""
    known = values[np.isfinite(values)]
    return float(f"{known.mean():.5g}") if len(known) else math.nan


def finite(series: Series) -> Series:
    """Without NaN and infinity, which files of others may have."""
    is_finite = np.isfinite(series.values)
    return Series(series.steps[is_finite], series.values[is_finite])


def _thinned(steps: FloatArray, values: FloatArray, *ends: FloatArray, points: int) -> dict[str, list[float]]:
    """Steps, values and both ends of their interval, to five digits. Of many, the lowest and the highest of each
    stretch: spikes stay.
    """
    chosen = np.arange(len(values))
    if len(values) > points:
        stretches = np.array_split(chosen, points // 2)
        chosen = np.unique([stretch[pick(values[stretch])] for stretch in stretches for pick in (np.argmin, np.argmax)])
    names = ("x", "y", "low", "high") if len(ends) == 2 else ("x", "y")
    return {
        name: [float(f"{v:.5g}") for v in array[chosen]]
        for name, array in zip(names, (steps, values, *ends), strict=False)
    }


def paired(
    groups: Sequence[tuple[str, Configuration]], runs: Mapping[str, PageRun], known: Mapping[str, Solved]
) -> dict[str, Any] | None:
    """Final pass@1 of each configuration less that of the first run's, by `eval.paired.compare` over problems and
    Student's t over seeds. Runs without one are passed over.

    Args:
        known: run -> what it solved at the end.
    """
    first = next((name for name, run in runs.items() if run.result.final_pass_at_1 is not None), None)
    if first is None:
        return None
    [(base_name, base)] = [(name, group) for name, group in groups if any(run.name == first for run in group.runs)]
    rows, points = [], []
    for number, (name, group) in enumerate(groups):
        one, other = ({runs[run.name].settings.get("seed"): run for run in each.counted} for each in (base, group))
        pairs = [(run, other[seed]) for seed, run in one.items() if seed in other]
        differences = np.array([[(b.final_pass_at_1 or 0.0) - (a.final_pass_at_1 or 0.0)] for a, b in pairs])  # [S, 1]
        if group is not base and pairs:
            found = _over_problems([known[a.name] for a, _ in pairs], [known[b.name] for _, b in pairs])
            ends, over_seeds = None, "one seed"
            if len(pairs) > 1 and np.isfinite(differences).all():
                low, high = mean_interval(differences)
                ends, over_seeds = (
                    [float(low[0]), float(high[0])],
                    f"[{low[0]:+.3f}, {high[0]:+.3f}], {len(pairs)} seeds",
                )
            rows.append([name, f"{differences.mean():+.3f}", *_cells(found), over_seeds])
            over_problems = [found.low, found.high] if isinstance(found, PairedResult) else None
            points.append(
                {
                    "group": number,
                    "difference": float(differences.mean()),
                    "over_problems": over_problems,
                    "over_seeds": ends,
                }
            )
    return {"baseline": base_name, "columns": PAIRED_COLUMNS, "rows": rows, "points": points} if rows else None


def _over_problems(first: Sequence[Solved], second: Sequence[Solved]) -> PairedResult | str:
    """The two compared over all of these runs, or why they cannot be."""
    one, other = (
        {problem: sum((run.get(problem, Counter()) for run in runs), Counter()) for problem in runs[0]}
        for runs in (first, second)
    )
    totals = {count.total() for count in (*one.values(), *other.values())}
    if not one or not other:
        return "not on record"
    if one.keys() != other.keys():
        return "other problems"
    if len(totals) != 1:
        return "tried more often"
    right, other_right = (np.array([each[problem][True] for problem in one]) for each in (one, other))
    return compare(right, other_right, totals.pop(), bootstrap_samples=BOOTSTRAP_SAMPLES, seed=0)


def _cells(found: PairedResult | str) -> list[str]:
    """Interval, p-value, and on how many problems the second is better and worse."""
    if isinstance(found, str):
        return [found, "", "", ""]
    p_value = "< 0.0001" if found.p_value < 1e-4 else f"{found.p_value:.4f}"
    return [f"[{found.low:+.3f}, {found.high:+.3f}]", p_value, str(found.num_better), str(found.num_worse)]
