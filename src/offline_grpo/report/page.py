"""Writes `report.html`: a page about one run, or about many, that needs no other file and no network.

Whatever comes from a run reaches the page as JSON, and `assets/page.js` puts it in place as plain text. So nothing in a
run can act.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from offline_grpo.disk import utf8, write_whole
from offline_grpo.eval.paired import PairedResult, compare
from offline_grpo.eval.table import p_text
from offline_grpo.report.figures import SILENT, Figure, bounds_of, figures, series_of, smooth
from offline_grpo.report.findings import find, shared
from offline_grpo.report.history import FloatArray, count, duration
from offline_grpo.report.run_files import about, choices_of
from offline_grpo.report.runs import (
    MIN_SEEDS,
    Configuration,
    Run,
    configurations,
    have_own_seeds,
    load_runs,
    mean_curve,
    mean_interval,
    names_of,
)
from offline_grpo.report.samples import Solved, samples_of, solved, solved_by_configuration, solved_over_time
from offline_grpo.report.summary import results_table
from offline_grpo.report.sweep import configurations_table, runs_table
from offline_grpo.report.tables import Table

MAX_VALUE = 200  # letters of a setting
MAX_POINTS, MAX_POINTS_IN_ALL = 300, 6000  # of a curve, and of the curves of a metric over all runs
BOOTSTRAP_SAMPLES = 1000


def save_page(paths: Sequence[Path], out: Path) -> Path:
    """Write the page about runs, and about the runs of sweeps, to `out` and return that.

    Raises:
        ConfigError: a path has no run.
    """
    title = "/".join(paths[0].resolve().parts[-2:]) if len(paths) == 1 else f"{len(paths)} folders"
    write_whole(out, page(content(load_runs(paths), title)))
    return out


def page(data: Mapping[str, Any]) -> str:
    """The page as HTML."""
    assets = files("offline_grpo.report") / "assets"
    return Template((assets / "page.html").read_text()).substitute(
        title=html.escape(utf8(data["title"])),
        css=(assets / "page.css").read_text(),
        js="".join((assets / name).read_text() for name in ("charts.js", "names.js", "page.js")),
        plotly=_plotly(),
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


@cache
def _plotly() -> str:
    """The library that draws, 4.8 MB, packed to 1.9 MB."""
    code = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 6, mtime=0)).decode()


def content(runs: Sequence[Run], title: str) -> dict[str, Any]:
    """All that the page says."""
    groups = configurations(runs)
    names, is_one = names_of(groups), len(runs) == 1
    known = {run.name: solved(run.history) for run in runs} if len(groups) > 1 else {}
    drawn = figures([run.history for run in runs])
    # Of several runs each curve has a figure of its own, so that colours tell runs apart.
    shown = drawn if is_one else [part for each in drawn for part in each.split()]
    table = results_table(runs[0].history) if is_one else configurations_table(groups)
    return {
        "title": title,
        "about": _about(runs),
        "verdict": _verdict(table) if is_one else _best(names, groups, table),
        "num_runs": len(runs),
        "groups": names,
        "results": _as_data(table),
        "findings": _findings(runs),
        "figures": [_figure(each, groups, is_one=is_one) for each in shown],
        "curves": _curves(groups, runs),
        "paired": _paired(names, groups, runs, known),
        "problems": solved_over_time(runs[0]) if is_one else solved_by_configuration(names, groups, known),
        "settings": None if is_one else _settings(runs),
        "samples": samples_of(runs),
    }


def _as_data(table: Table) -> dict[str, Any]:
    return {"columns": table.columns, "rows": table.rows}


def _figure(figure: Figure, groups: Sequence[Configuration], *, is_one: bool) -> dict[str, Any]:
    """A figure's words, and the numbers of one that is stacked."""
    keys = ("section", "title", "unit", "curves", "from_zero", "stacked")
    parts = (_parts if is_one else _mean_parts)(figure, groups) if figure.stacked else None
    return {key: getattr(figure, key) for key in keys} | {"parts": parts}


def _parts(figure: Figure, groups: Sequence[Configuration]) -> dict[str, Any] | None:
    """Of one run over its iterations `x`, in means over stretches of them."""
    history = groups[0].runs[0].history
    found = history.parts(metric.removeprefix("train/") for metric in figure.curves)
    stretches = np.array_split(np.arange(len(history.train)), min(MAX_POINTS, len(history.train)) or 1)
    columns = {figure.curves[f"train/{key}"]: values for key, values in found.items()}
    columns[""] = np.array(list(history.train), dtype=np.float64) + 1
    y = {name: [_short(values[stretch].mean()) for stretch in stretches] for name, values in columns.items() if found}
    return {"x": y.pop(""), "y": y} if y else None


def _mean_parts(figure: Figure, groups: Sequence[Configuration]) -> dict[str, Any] | None:
    """Of several runs the mean of each configuration."""
    y = {}
    for metric, name in figure.curves.items():
        key = metric.removeprefix("train/")
        found = [[run.history.parts([key]).get(key) for run in each.best_known] for each in groups]
        means = [[values.mean() for values in each if values is not None] for each in found]
        if any(means):
            y[name] = [_short(sum(each) / len(each)) if each else 0.0 for each in means]
    return {"x": None, "y": y} if y else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _curves(groups: Sequence[Configuration], runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Every metric of every run: metric -> for each configuration its runs, their mean and its interval."""
    points = max(40, min(MAX_POINTS, MAX_POINTS_IN_ALL // len(runs)))
    keys = {f"{name}/{key}" for run in runs for name in ("train", "eval") for key in run.history.keys(name)}
    keys -= {f"{key}_{end}" for key in keys for end in ("low", "high")}
    found: dict[str, list[dict[str, Any]]] = {}
    for metric in [*sorted(keys), SILENT]:
        for number, group in enumerate(groups):
            series = {run.name: each for run in group.runs if len(each := series_of(run.history, metric))}
            if not series:
                continue
            counted = [run for run in group.best_known if run.name in series]
            singles = [{"run": run} | _thinned(each.steps, each.values, points=points) for run, each in series.items()]
            curve = _mean_of(counted, metric, points)
            found.setdefault(metric, []).append({"group": number, "runs": singles} | curve)
    return found


def _mean_of(counted: Sequence[Run], metric: str, points: int) -> dict[str, list[float]]:
    """Mean and interval over runs, of running means where there are many iterations; of one run, what it recorded."""
    smoothed = [series_of(run.history, metric) for run in counted]
    steps, values = mean_curve([replace(each, values=smooth(each.values)) for each in smoothed])
    if not len(steps):
        return {}
    bounds = None
    if len(counted) == 1:
        bounds = bounds_of(counted[0].history, metric)
        bounds = None if bounds is None else (smooth(bounds[0]), smooth(bounds[1]))
    elif len(counted) >= MIN_SEEDS and have_own_seeds(counted):
        bounds = mean_interval(values)
    return _thinned(steps, values.mean(0), *(bounds or ()), points=points)


def _thinned(steps: FloatArray, values: FloatArray, *ends: FloatArray, points: int) -> dict[str, list[float]]:
    """Steps, values and ends of their interval. Of many, the lowest and the highest of each stretch: spikes stay."""
    chosen = np.arange(len(values))
    if len(values) > points:
        stretches = np.array_split(chosen, points // 2)
        chosen = np.unique([stretch[pick(values[stretch])] for stretch in stretches for pick in (np.argmin, np.argmax)])
    columns = zip(("x", "y", "low", "high"), (steps, values, *ends), strict=False)
    return {name: [_short(value) for value in array[chosen]] for name, array in columns}


def _findings(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Each once, with the runs that it holds for where there are several."""
    found = []
    for each, names in shared({run.name: find(run.history) for run in runs}):
        where = f"run {names[0]}"
        if len(names) > 1:
            where = f"{len(names)} of {len(runs)} runs ({', '.join(names)}; numbers of the first)"
        found.append({"where": where if len(runs) > 1 else "", **asdict(each)})
    return found


def _about(runs: Sequence[Run]) -> str:
    took = duration(sum(run.history.total_s for run in runs))
    if len(runs) > 1:
        return f"{count(len(runs), 'run')}, {took} in all"
    [run] = runs
    facts = [about(run.history.run_dir), run.history.size, took, "" if run.is_done else run.status]
    return ", ".join(filter(None, facts))


def _verdict(table: Table) -> str:
    """Of one run: its first result."""
    if not table.rows:
        return "There are no results yet."
    label, first, last, _ = table.rows[0]
    return f"{label}: {first} before training, {last} after it." if first and last else f"{label}: {first or last}."


def _best(names: Sequence[str], groups: Sequence[Configuration], table: Table) -> str:
    """Of several: the highest pass@1, also where that run is not done."""
    rows = zip(names, groups, table.rows, strict=True)
    ranked = [(each.pass_at_1, row[2], name) for name, each, row in rows if each.pass_at_1 is not None]
    if not ranked:
        return "No run has evaluated held-out problems."
    _, score, best = max(ranked)
    return f"The highest pass@1 on held-out problems at the end is {score}, of {best}."


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """A row for each run, and a column for each setting, or option of a group, that differs."""
    chosen = []
    for run in runs:
        stored = run.history.run_dir / ".hydra" / "hydra.yaml"
        choices = choices_of(run.history.run_dir) if stored.is_file() else {}
        chosen.append({key: value[:MAX_VALUE] for key, value in (choices | dict(run.settings)).items()})
    keys = dict.fromkeys(key for each in chosen for key in each)
    differ = [key for key in keys if key != "resume" and len({each.get(key) for each in chosen}) > 1]
    shown = [replace(run, overrides={}, settings=each) for run, each in zip(runs, chosen, strict=True)]
    return _as_data(runs_table(shown, differ))


def _paired(
    names: Sequence[str], groups: Sequence[Configuration], runs: Sequence[Run], known: Mapping[str, Solved]
) -> dict[str, Any] | None:
    """Final pass@1 of each configuration less that of the first run's, by `eval.paired.compare` over problems and
    Student's t over seeds. Runs without one are passed over.

    Args:
        known: run -> what it solved at the end.
    """
    first = next((run for run in runs if run.final_pass_at_1 is not None), None)
    base = next((group for group in groups if first in group.runs), None)
    if base is None:
        return None
    rows, points = [], []
    for number, (name, group) in enumerate(zip(names, groups, strict=True)):
        one, other = ({run.settings.get("seed"): run for run in each.counted} for each in (base, group))
        pairs = [(run, other[seed]) for seed, run in one.items() if seed in other]
        if group is base or not pairs:
            continue
        differences = np.array([[(b.final_pass_at_1 or 0) - (a.final_pass_at_1 or 0)] for a, b in pairs])  # [S, 1]
        over_seeds = over_problems = None
        if len(pairs) > 1:
            low, high = mean_interval(differences)
            over_seeds = (float(low[0]), float(high[0]))
        cells = ["not comparable", "", "", ""]
        if (found := _over_problems([known[a.name] for a, _ in pairs], [known[b.name] for _, b in pairs])) is not None:
            over_problems = (found.low, found.high)
            p_value = p_text(found).removeprefix("p ").removeprefix("= ")
            cells = [_interval(over_problems), p_value, str(found.num_better), str(found.num_worse)]
        difference = float(differences.mean())
        seeds = f"{_interval(over_seeds)}, {len(pairs)} seeds" if over_seeds else "one seed"
        rows.append([name, f"{difference:+.3f}", *cells, seeds])
        points.append({"group": number, "difference": difference})
        points[-1] |= {"over_problems": over_problems, "over_seeds": over_seeds}
    columns = ("configuration", "difference", "95% over problems", "p", "better on", "worse on", "95% over seeds")
    baseline = names[groups.index(base)]
    return {"baseline": baseline, "columns": columns, "rows": rows, "points": points} if rows else None


def _interval(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:+.3f}, {ends[1]:+.3f}]"


def _over_problems(first: Sequence[Solved], second: Sequence[Solved]) -> PairedResult | None:
    """The two compared over all of these runs; None unless both have on record the same problems, tried as often."""
    one, other = (
        {problem: sum((run.get(problem, Counter()) for run in runs), Counter()) for problem in runs[0]}
        for runs in (first, second)
    )
    totals = {count.total() for count in (*one.values(), *other.values())}
    if one.keys() != other.keys() or len(totals) != 1:
        return None
    right, other_right = (np.array([each[problem][True] for problem in one]) for each in (one, other))
    return compare(right, other_right, totals.pop(), bootstrap_samples=BOOTSTRAP_SAMPLES, seed=0)
