"""Writes `report.html`: a page about one run, or about many, that needs no other file and no network.

Whatever comes from a run reaches the page as JSON, and `assets/page.js` puts it in place as plain text. So nothing in a
run can act.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from itertools import groupby, product
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from offline_grpo.disk import write_whole
from offline_grpo.eval.statistics import compare, mean_interval, p_text, t_p_value
from offline_grpo.formats import significant, utf8
from offline_grpo.report.configurations import (
    MIN_SEEDS,
    Configuration,
    configurations,
    have_own_seeds,
    mean_curve,
    searched,
)
from offline_grpo.report.findings import find, shared
from offline_grpo.report.plots import Figure, figures, smooth
from offline_grpo.report.runs import OF_ADDRESS, SILENT, FloatArray, Run, count, duration, load_runs
from offline_grpo.report.samples import Solved, heat_map, samples_of, solved, solved_over_time, summed
from offline_grpo.report.tables import configurations_table, results_table, runs_table, with_interval

MAX_VALUE = 200  # letters of a setting
MAX_POINTS, MAX_POINTS_IN_ALL = 300, 6000  # of a curve, and of the curves of a metric over all runs


def save_page(paths: Sequence[Path], out: Path) -> Path:
    """Write the page about runs, and about the runs of sweeps, to `out` and return that."""
    # A template, the three parts of the page's program, the library that draws, and all that they show as JSON.
    title = "/".join(Path(os.path.commonpath([path.resolve() for path in paths])).parts[-2:])
    assets = files("offline_grpo.report") / "assets"
    data = json.dumps(content(load_runs(paths)), allow_nan=False, separators=(",", ":"))
    page = Template((assets / "page.html").read_text()).substitute(
        title=html.escape(utf8(title)),
        css=(assets / "page.css").read_text(),
        js="".join((assets / name).read_text() for name in ("charts.js", "names.js", "page.js")),
        plotly=_plotly(),
        data=data.replace("<", "\\u003c"),
    )
    write_whole(out, page)
    return out


@cache
def _plotly() -> str:
    """The library that draws, 4.8 MB, packed to 1.9 MB."""
    code = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 6, mtime=0)).decode()


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page says."""
    groups, drawn = configurations(runs), figures(runs)
    known = {run.name: solved(run) for run in runs}
    # What is out of the ordinary: each once, with the runs that it holds for where there are several.
    findings = []
    for finding, names in shared({run.name: find(run) for run in runs}):
        where = f"run {names[0]}" if len(runs) > 1 else ""
        if len(names) > 1:
            where = f"{len(names)} of {len(runs)} runs ({', '.join(names)}; numbers of the first)"
        findings.append({"where": where, **asdict(finding)})
    found = {
        "num_runs": len(runs),
        "groups": [group.name for group in groups],
        "findings": findings,
        "curves": _curves(groups, runs),
        "paired": _paired(groups, runs, known),
        "searched": searched(runs),
        "samples": samples_of(runs),
    }
    # Of one run: where it began, where it ended, and its problems over time.
    if len(runs) == 1:
        [run] = runs
        table = results_table(run)
        first = next(((label, before, after) for label, before, after, _ in table.rows if before or after), None)
        facts = [run.about, run.size, duration(run.total_s), "" if run.is_done else run.status]
        return found | {
            "about": ", ".join(filter(None, facts)),
            "verdict": "{}: {} before training, {} after it.".format(*first) if first else "There are no results yet.",
            "results": asdict(table),
            "figures": [_figure(each, groups) for each in drawn],
            "problems": solved_over_time(run),
            "settings": None,
        }
    # Of several: the best of each evaluation, whose configurations stand together.
    scores = []
    for _, alike in groupby((each for each in groups if each.pass_at_1 is not None), lambda each: each.evaluation):
        best = max(alike, key=lambda each: each.pass_at_1 or 0.0)
        scores.append(f"{with_interval(best.pass_at_1, best.interval)}, of {best.name}")
    verdict = "No run has evaluated held-out problems."
    if len(scores) == 1:
        verdict = f"The highest pass@1 on held-out problems at the end is {scores[0]}."
    elif scores:
        several = "; ".join(scores)
        verdict = f"The runs differ in what is evaluated. The highest pass@1 at the end of each evaluation: {several}."
    # The options of groups and the settings in which runs differ, the ends of long ones cut off.
    chosen = {run.name: {key: value[:MAX_VALUE] for key, value in (run.choices | run.settings).items()} for run in runs}
    keys = dict.fromkeys(key for each in chosen.values() for key in each if key not in {"resume", *OF_ADDRESS})
    differing = [key for key in keys if len({each.get(key) for each in chosen.values()}) > 1]
    # Held-out problems of each configuration, over its seeds.
    tables = {each.name: summed([known[run.name] for run in each.counted]) for each in groups}
    tables = {name: table for name, table in tables.items() if table}
    return found | {
        "about": f"{count(len(runs), 'run')}, {duration(sum(run.total_s for run in runs))} in all",
        "verdict": verdict,
        "results": asdict(configurations_table(groups)),
        # Each curve has a figure of its own, so that colours tell runs apart.
        "figures": [_figure(part, groups) for each in drawn for part in each.split()],
        "problems": heat_map(list(tables), list(tables.values())),
        "settings": asdict(runs_table(runs, differing, chosen)),
    }


def _figure(figure: Figure, groups: Sequence[Configuration]) -> dict[str, Any]:
    """A figure's words; of one that is stacked also its numbers, of others `_curves` has them."""
    keys = ("section", "title", "unit", "curves", "from_zero", "stacked")
    found = {key: getattr(figure, key) for key in keys} | {"parts": None}
    if not figure.stacked:
        return found
    # Of one run in each of its iterations `x`; of several, the mean over the iterations of each configuration.
    x, columns = None, [[m for run in each.best_known for m in run.train.values()] for each in groups]
    if [len(each.runs) for each in groups] == [1]:
        x, columns = [i + 1 for i in groups[0].runs[0].train], [[metrics] for metrics in columns[0]]
    y = {}
    for metric, name in figure.curves.items():
        values = [[each.get(metric.removeprefix("train/"), 0.0) for each in column] for column in columns]
        if any(map(any, values)):
            y[name] = [significant(sum(own) / max(len(own), 1), 5) for own in values]
    return found | {"parts": {"x": x, "y": y} if y else None}


def _curves(groups: Sequence[Configuration], runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Every metric of every run: metric -> for each configuration its runs, their mean and its interval."""
    points = max(40, min(MAX_POINTS, MAX_POINTS_IN_ALL // len(runs)))
    keys = {f"{name}/{key}" for run in runs for name in ("train", "eval") for key in run.keys(name)}
    keys -= {f"{key}_{end}" for key in keys for end in ("low", "high")}
    found: dict[str, list[dict[str, Any]]] = {}
    for metric, (number, group) in product([*sorted(keys), SILENT], enumerate(groups)):
        series = {run.name: each for run in group.runs if len(each := run.series(metric))}
        if not series:
            continue
        singles = [{"run": run} | _thinned(each.steps, each.values, points) for run, each in series.items()]
        curve: dict[str, Any] = {"group": number, "runs": singles}
        # The mean over the runs, of running means where there are many iterations.
        counted = [run for run in group.best_known if run.name in series]
        smoothed = (series[run.name] for run in counted)
        steps, values = mean_curve([replace(each, values=smooth(each.values)) for each in smoothed])
        # Its interval is over seeds; of one run it is what that recorded.
        ends: Sequence[FloatArray] = ()
        if len(counted) == 1:
            ends = [smooth(end) for end in counted[0].bounds(metric) or ()]
        elif len(counted) >= MIN_SEEDS and have_own_seeds(counted) and len(steps):
            ends = mean_interval(values)
        found.setdefault(metric, []).append(
            curve | (_thinned(steps, values.mean(0), points, *ends) if len(steps) else {})
        )
    return found


def _thinned(steps: FloatArray, values: FloatArray, points: int, *ends: FloatArray) -> dict[str, list[float]]:
    """Steps, values and ends of their interval. Of many, the lowest and the highest of each stretch: spikes stay."""
    chosen = np.arange(len(values))
    if len(values) > points:
        stretches = np.array_split(chosen, points // 2)
        chosen = np.unique([stretch[pick(values[stretch])] for stretch in stretches for pick in (np.argmin, np.argmax)])
    columns = zip(("x", "y", "low", "high"), (steps, values, *ends), strict=False)
    return {name: [significant(value, 5) for value in array[chosen]] for name, array in columns}


def _paired(groups: Sequence[Configuration], runs: Sequence[Run], known: Mapping[str, Solved]) -> dict[str, Any] | None:
    """Final pass@1 of each configuration less that of the first run's, seed by seed, with Student's t over seeds. One
    seed in common makes two models, whose interval is over problems, and no p-value. Runs without pass@1, and those
    with another evaluation, are passed over.

    Args:
        known: run -> what it solved at the end.
    """
    # The baseline is the configuration of the first run that was evaluated.
    first = next((run for run in runs if run.pass_at_1 is not None), None)
    base = next((group for group in groups if first in group.runs), groups[0])
    rows, points = [], []
    for number, group in enumerate(groups):
        # The runs of both that have a seed in common.
        of_base, own = ({run.settings.get("seed"): run for run in each.counted} for each in (base, group))
        pairs = [(run, own[seed]) for seed, run in of_base.items() if seed in own]
        if group is base or group.evaluation != base.evaluation or not pairs:
            continue
        differences = np.array([(b.pass_at_1 or 0) - (a.pass_at_1 or 0) for a, b in pairs])
        # Over all of these runs: only where both have on record the same problems, tried as often.
        one, other = (summed([known[run.name] for run in side]) for side in zip(*pairs, strict=True))
        found = None
        if one.keys() == other.keys() and all(one[each].num == other[each].num for each in one) and one:
            numbers = [(one[each].num_right, other[each].num_right, one[each].num) for each in one]
            found = compare(*np.array(numbers).T)
        # The interval is over seeds, unless all differ alike; of one seed over problems.
        ends, over, p_value = None, "", "one seed"
        if len(pairs) > 1:
            over, p_value = f"{len(pairs)} seeds", ""
            if np.ptp(differences) > 1e-9:
                ends = tuple(map(float, mean_interval(differences)))
                p_value = p_text(t_p_value(differences)).removeprefix("p ").removeprefix("= ")
        elif found is not None:
            ends, over = (found.low, found.high), "problems"
        mean = float(differences.mean())
        interval = "[{:+.3f}, {:+.3f}]".format(*ends) if ends else ""
        counts = [str(found.num_better), str(found.num_worse)] if found else ["not comparable", ""]
        rows.append([group.name, f"{mean:+.3f}", interval, over, p_value, *counts])
        points.append({"group": number, "difference": mean, "ends": ends})
    columns = ("configuration", "difference", "95%", "over", "p", "better on", "worse on")
    return {"baseline": base.name, "columns": columns, "rows": rows, "points": points} if rows else None
