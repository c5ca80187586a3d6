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

from offline_grpo.disk import utf8, write_whole
from offline_grpo.eval.intervals import mean_interval, t_p_value
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
    configurations_table,
    have_own_seeds,
    load_runs,
    mean_curve,
    runs_table,
    same_seeds,
    searched,
)
from offline_grpo.report.samples import Solved, samples_of, solved, solved_by_configuration, solved_over_time, summed
from offline_grpo.report.summary import results_table
from offline_grpo.report.tables import with_interval

MAX_VALUE = 200  # letters of a setting
MAX_POINTS, MAX_POINTS_IN_ALL = 300, 6000  # of a curve, and of the curves of a metric over all runs


def save_page(paths: Sequence[Path], out: Path) -> Path:
    """Write the page about runs, and about the runs of sweeps, to `out` and return that.

    Raises:
        ConfigError: a path has no run.
    """
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
    groups, drawn = configurations(runs), figures([run.history for run in runs])
    known = {run.name: solved(run.history) for run in runs}
    found = {
        "num_runs": len(runs),
        "groups": [group.name for group in groups],
        "findings": _findings(runs),
        "curves": _curves(groups, runs),
        "paired": _paired(groups, runs, known),
        "searched": searched(runs),
        "samples": samples_of(runs),
    }
    # Of one run: where it began, where it ended, and its problems over time.
    if len(runs) == 1:
        [run] = runs
        facts = [about(run.history.run_dir), run.history.size, duration(run.history.total_s)]
        table = results_table(run.history)
        first = next(((label, before, after) for label, before, after, _ in table.rows if before or after), None)
        return found | {
            "about": ", ".join(filter(None, [*facts, "" if run.is_done else run.status])),
            "verdict": "{}: {} before training, {} after it.".format(*first) if first else "There are no results yet.",
            "results": asdict(table),
            "figures": [_figure(each, groups) for each in drawn],
            "problems": solved_over_time(run),
            "settings": None,
        }
    # Of several: the best of each evaluation, whose configurations stand together; in what they differ, and how much.
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
    took = duration(sum(run.history.total_s for run in runs))
    return found | {
        "about": f"{count(len(runs), 'run')}, {took} in all",
        "verdict": verdict,
        "results": asdict(configurations_table(groups)),
        # Each curve has a figure of its own, so that colours tell runs apart.
        "figures": [_figure(part, groups) for each in drawn for part in each.split()],
        "problems": solved_by_configuration(groups, known),
        "settings": _settings(runs),
    }


def _findings(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Each once, with the runs that it holds for where there are several."""
    found = []
    for each, names in shared({run.name: find(run.history) for run in runs}):
        where = f"run {names[0]}" if len(runs) > 1 else ""
        if len(names) > 1:
            where = f"{len(names)} of {len(runs)} runs ({', '.join(names)}; numbers of the first)"
        found.append({"where": where, **asdict(each)})
    return found


def _figure(figure: Figure, groups: Sequence[Configuration]) -> dict[str, Any]:
    """A figure's words; of one that is stacked also its numbers, of others `_curves` has them."""
    keys = ("section", "title", "unit", "curves", "from_zero", "stacked")
    found = {key: getattr(figure, key) for key in keys} | {"parts": None}
    if not figure.stacked:
        return found
    # Of one run in each of its iterations `x`; of several, the mean over the iterations of each configuration.
    x, columns = None, [[m for run in each.best_known for m in run.history.train.values()] for each in groups]
    if [len(each.runs) for each in groups] == [1]:
        x, columns = [i + 1 for i in groups[0].runs[0].history.train], [[metrics] for metrics in columns[0]]
    y = {}
    for metric, name in figure.curves.items():
        values = [[each.get(metric.removeprefix("train/"), 0.0) for each in column] for column in columns]
        if any(map(any, values)):
            y[name] = [_short(sum(own) / max(len(own), 1)) for own in values]
    return found | {"parts": {"x": x, "y": y} if y else None}


def _curves(groups: Sequence[Configuration], runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Every metric of every run: metric -> for each configuration its runs, their mean and its interval."""
    points = max(40, min(MAX_POINTS, MAX_POINTS_IN_ALL // len(runs)))
    keys = {f"{name}/{key}" for run in runs for name in ("train", "eval") for key in run.history.keys(name)}
    keys -= {f"{key}_{end}" for key in keys for end in ("low", "high")}
    found: dict[str, list[dict[str, Any]]] = {}
    for metric, (number, group) in product([*sorted(keys), SILENT], enumerate(groups)):
        series = {run.name: each for run in group.runs if len(each := series_of(run.history, metric))}
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
            ends = [smooth(end) for end in bounds_of(counted[0].history, metric) or ()]
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
    return {name: [_short(value) for value in array[chosen]] for name, array in columns}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """A row for each run, and a column for each setting, or option of a group, that differs."""
    # The options of groups, and all settings, the ends of long ones cut off.
    chosen = []
    for run in runs:
        stored = run.history.run_dir / ".hydra" / "hydra.yaml"
        choices = choices_of(run.history.run_dir) if stored.is_file() else {}
        chosen.append({key: value[:MAX_VALUE] for key, value in (choices | dict(run.settings)).items()})
    keys = dict.fromkeys(key for each in chosen for key in each if key != "resume")
    differ = [key for key in keys if len({each.get(key) for each in chosen}) > 1]
    shown = [replace(run, overrides={}, settings=each) for run, each in zip(runs, chosen, strict=True)]
    return asdict(runs_table(shown, differ))


def _paired(groups: Sequence[Configuration], runs: Sequence[Run], known: Mapping[str, Solved]) -> dict[str, Any] | None:
    """Final pass@1 of each configuration less that of the first run's, seed by seed, with Student's t over seeds. One
    seed in common makes two models, whose interval is over problems, and no p-value. Runs without pass@1, and those
    with another evaluation, are passed over.

    Args:
        known: run -> what it solved at the end.
    """
    # The baseline is the configuration of the first run that was evaluated.
    first = next((run for run in runs if run.final_pass_at_1 is not None), None)
    base = next((group for group in groups if first in group.runs), groups[0])
    rows, points = [], []
    for number, group in enumerate(groups):
        pairs = same_seeds(base, group) if group.evaluation == base.evaluation else []
        if group is base or not pairs:
            continue
        differences = np.array([(b.final_pass_at_1 or 0) - (a.final_pass_at_1 or 0) for a, b in pairs])
        found = _over_problems([known[a.name] for a, _ in pairs], [known[b.name] for _, b in pairs])
        counts = [str(found.num_better), str(found.num_worse)] if found else ["not comparable", ""]
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
        rows.append([group.name, f"{mean:+.3f}", interval, over, p_value, *counts])
        points.append({"group": number, "difference": mean, "ends": ends})
    columns = ("configuration", "difference", "95%", "over", "p", "better on", "worse on")
    return {"baseline": base.name, "columns": columns, "rows": rows, "points": points} if rows else None


def _over_problems(first: Sequence[Solved], second: Sequence[Solved]) -> PairedResult | None:
    """The two compared over all of these runs; None unless both have on record the same problems, tried as often."""
    one, other = summed(first), summed(second)
    totals = {count.total() for count in (*one.values(), *other.values())}
    if one.keys() != other.keys() or len(totals) != 1:
        return None
    right, other_right = (np.array([each[problem][True] for problem in one]) for each in (one, other))
    return compare(right, other_right, totals.pop())
