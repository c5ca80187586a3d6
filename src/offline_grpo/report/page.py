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
from dataclasses import replace
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
from offline_grpo.report.findings import LEAST_ITERATIONS, find, shared
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

MAX_COLUMNS, MAX_VALUE = 24, 200  # of settings; letters of one
MAX_NAMED = 12  # runs that a finding lists
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
    drawn = [part for each in figures([run.history for run in runs]) for part in (each, each.right) if part is not None]
    # Of several runs each curve has a figure of its own, so that colours tell runs apart.
    shown = drawn if is_one else [part for each in drawn for part in each.split()]
    table = results_table(runs[0].history) if is_one else configurations_table(groups)
    return {
        "title": title,
        "about": _about(runs),
        "verdict": _verdict(table) if is_one else _verdict_of_many(names, groups, table),
        "num_runs": len(runs),
        "groups": names,
        "results": _as_data(table),
        "findings": _findings(runs),
        "not_judged": _not_judged(runs),
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
    if not found:
        return None
    stretches = np.array_split(np.arange(len(history.train)), min(MAX_POINTS, len(history.train)))
    steps = np.array(list(history.train), dtype=np.float64) + 1
    means = {figure.curves[f"train/{key}"]: _means(values, stretches) for key, values in found.items()}
    return {"x": _means(steps, stretches), "y": means}


def _means(values: FloatArray, stretches: Sequence[Any]) -> list[float]:
    return [_short(values[stretch].mean()) for stretch in stretches]


def _mean_parts(figure: Figure, groups: Sequence[Configuration]) -> dict[str, Any] | None:
    """Of several runs the mean of each configuration."""
    y = {}
    for metric, name in figure.curves.items():
        key = metric.removeprefix("train/")
        means = [
            [values.mean() for run in each.best_known for values in run.history.parts([key]).values()]
            for each in groups
        ]
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
    """Steps, values and both ends of their interval, to five digits. Of many, the lowest and the highest of each
    stretch: spikes stay."""
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
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        where = f"{len(names)} of {len(runs)} runs ({', '.join(names[:MAX_NAMED])}{more})"
        if len(names) == 1:
            where = f"run {names[0]}" if len(runs) > 1 else ""
        elif len(names) == len(runs):
            where = f"all {len(runs)} runs"
        found.append({"where": where, "text": each.observation, "advice": each.advice, "metric": each.metric})
    return found


def _not_judged(runs: Sequence[Run]) -> str:
    """A sentence about runs that are too short for findings; empty where there is none."""
    short = sum(len(run.history.train) < LEAST_ITERATIONS for run in runs)
    if not short:
        return ""
    which = "The run has" if len(runs) == 1 else f"{short} of {len(runs)} runs {'has' if short == 1 else 'have'}"
    return (
        f"{which} fewer than {LEAST_ITERATIONS} iterations, in which noise looks like a trend; little is pointed out."
    )


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
    if not first or not last:
        return f"{label}: {first or last}, measured once."
    if first.split()[0] == last.split()[0]:
        return f"{label} stayed at {last}."
    (low, high), (end_low, end_high) = (_ends(cell) for cell in (first, last))
    way = "rose" if end_low > high else "fell" if end_high < low else "went"
    chance = " The intervals overlap, so this may be chance." if way == "went" and "[" in last else ""
    return f"{label} {way} from {first} to {last}.{chance}"


def _ends(cell: str) -> tuple[float, float]:
    """`0.5 [0.4, 0.6]` -> 0.4, 0.6; infinite ones where no interval is known."""
    _, bracket, ends = cell.partition("[")
    low, high = (ends.rstrip("]") if bracket else "-inf, inf").split(", ")
    return float(low), float(high)


def _verdict_of_many(names: Sequence[str], groups: Sequence[Configuration], table: Table) -> str:
    rows = zip(names, groups, table.rows, strict=True)
    ranked = sorted(
        ((each.pass_at_1, row[2], name) for name, each, row in rows if each.pass_at_1 is not None), reverse=True
    )
    if not ranked:
        return "No run has evaluated held-out problems."
    (_, high, best), (_, low, worst) = ranked[0], ranked[-1]
    lowest = f", the lowest {low}, of {worst}" if len(ranked) > 1 else ""
    return f"pass@1 on held-out problems at the end: the highest is {high}, of {best}{lowest}."


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """A row for each run, and a column for each setting, or option of a group, that differs."""
    chosen = [_all_settings(run) for run in runs]
    keys = dict.fromkeys(key for each in chosen for key in each)
    differ = [key for key in keys if key != "resume" and len({each.get(key) for each in chosen}) > 1]
    shown = [replace(run, overrides={}, settings=each) for run, each in zip(runs, chosen, strict=True)]
    return _as_data(runs_table(shown, differ[:MAX_COLUMNS])) | {"left_out": differ[MAX_COLUMNS:]}


def _all_settings(run: Run) -> dict[str, str]:
    stored = run.history.run_dir / ".hydra" / "hydra.yaml"
    choices = choices_of(run.history.run_dir) if stored.is_file() else {}
    return {key: value[:MAX_VALUE] for key, value in (choices | dict(run.settings)).items()}


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
        difference = float(differences.mean())
        found = _over_problems([known[a.name] for a, _ in pairs], [known[b.name] for _, b in pairs])
        seeds, over_seeds = None, "one seed"
        if len(pairs) > 1:
            low, high = mean_interval(differences)
            seeds = [float(low[0]), float(high[0])]
            over_seeds = f"[{low[0]:+.3f}, {high[0]:+.3f}], {len(pairs)} seeds"
        problems = None
        cells = [str(found), "", "", ""]
        if isinstance(found, PairedResult):
            problems = [found.low, found.high]
            p_value = p_text(found).removeprefix("p ").removeprefix("= ")
            cells = [f"[{found.low:+.3f}, {found.high:+.3f}]", p_value, str(found.num_better), str(found.num_worse)]
        rows.append([name, f"{difference:+.3f}", *cells, over_seeds])
        points.append({"group": number, "difference": difference, "over_problems": problems, "over_seeds": seeds})
    columns = ("configuration", "difference", "95% over problems", "p", "better on", "worse on", "95% over seeds")
    baseline = names[groups.index(base)]
    return {"baseline": baseline, "columns": columns, "rows": rows, "points": points} if rows else None


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
