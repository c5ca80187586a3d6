"""The table of a sweep, best configuration first, and `summary.csv`, `summary.md` and `sweep.png` beside its runs."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator
from rich.console import Console

from offline_grpo.report.figures import BLUE, COLORS, GREY
from offline_grpo.report.history import by_number, count
from offline_grpo.report.plots import PERCENT, band, fit, label, rows, sheet, style
from offline_grpo.report.runs import (
    MIN_SEEDS,
    NOT_COMPARED,
    Configuration,
    Run,
    configurations,
    difference,
    load_runs,
    mean_curve,
    same_seeds,
    share_interval,
)
from offline_grpo.report.tables import Table, number, say, with_interval

RESULTS = ("pass@1 [95%]", "best", "reward", "minutes")
NUMBERS = ("pass@1", "pass@1_low", "pass@1_high", "best_pass@1", "reward_mean", "minutes")  # of summary.csv
BEST_COLORS = [color for color in COLORS if color != GREY]
MAX_LABEL = 48  # letters of a configuration beside the plot
ROW_INCHES, LETTER_INCHES = 0.34, 0.075
NUMBER = re.compile(r"\d+(\.\d*)?(e[-+]?\d+)?")
MIN_SEARCHED = 5  # values of a number, in a search


def print_sweep(folders: Sequence[Path], console: Console) -> None:
    """Print the table of all configurations; of one folder, save tables and picture beside its runs.

    Raises:
        ConfigError: there is no run.
    """
    runs = load_runs(folders)
    found = configurations(runs)
    has_seeds = any(len(each.runs) > 1 for each in found)
    order = f"{'mean ' * has_seeds}final {'pass@1' if any(each.counted for each in found) else 'reward'}"
    order += " of each evaluation" * any(each.evaluation != found[0].evaluation for each in found)
    say(console, [f"{count(len(found), 'configuration')}, {count(len(runs), 'run')}, best {order} first"])
    if has_seeds:
        say(console, ["means over seeds with 95% intervals (Student's t: they assume a normal spread)"])
    elif len(found) > 1:
        say(console, ["intervals are over problems; to compare settings, run several seeds: seed=0,1,2"])
    configurations_table(found).print(console, num_folding=2)
    for each in found:
        for run in each.runs:
            note = "" if run in each.best_known else ", not in the mean"
            say(console, [] if run.is_done else [f"run {run.name}: {run.status}{note}"])
    if len(folders) == 1:
        say(console, save_summary(folders[0], runs, found))


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


def _rank(run: Run) -> tuple[bool, float, float]:
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
        for run in sorted(runs, key=_rank)
    ]
    return Table(["run", *keys, *RESULTS, "status"], rows)


def _results(score: float | None, interval: tuple[float, float] | None, *others: float | None) -> list[str]:
    """Cells of RESULTS."""
    best, reward, minutes = others
    took = number(minutes, ".1f" if minutes is None or minutes >= 1 else ".2g")
    return [with_interval(score, interval), number(best), number(reward), took]


def save_summary(multirun_dir: Path, runs: Sequence[Run], found: Sequence[Configuration]) -> list[Path]:
    """Write `summary.csv` (a row per run), `summary.md` (both tables) and, if pass@1 was measured, `sweep.png`."""
    csv_path, markdown_path, picture_path = (multirun_dir / f for f in ("summary.csv", "summary.md", "sweep.png"))
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    with csv_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "status", *NUMBERS])
        for run in sorted(runs, key=_rank):
            measured = (run.final_pass_at_1, *(run.interval or (None, None)))
            numbers = (*measured, run.best_pass_at_1, run.reward, run.minutes)
            writer.writerow([run.name, *(run.overrides.get(key, "") for key in keys), run.status, *numbers])
    differing = [key for key in keys if len(runs) == 1 or len({run.overrides.get(key) for run in runs}) > 1]
    tables = (configurations_table(found), runs_table(runs, differing))
    markdown_path.write_text("\n".join(table.markdown() for table in tables))
    measured = [each for each in found if each.pass_at_1 is not None]
    if not measured:
        return [csv_path, markdown_path]
    name = "/".join(multirun_dir.resolve().parts[-2:])
    draw_sweep(measured, name).savefig(picture_path, dpi=110)
    paths = [csv_path, markdown_path, picture_path]
    if points := searched([run for each in measured for run in each.counted]):
        paths.append(multirun_dir / "search.png")
        draw_search(points, name).savefig(paths[-1], dpi=110)
    return paths


def searched(runs: Sequence[Run]) -> dict[str, list[tuple[float, float]]]:
    """Key -> value and final pass@1 of each run, of the numbers in which runs differ; nothing unless one has
    more values than a grid.
    """
    found = {}
    for key in {key: None for run in runs for key in run.overrides if key not in NOT_COMPARED}:
        texts = [run.overrides.get(key, "") for run in runs]
        if len(set(texts)) > 1 and all(map(NUMBER.fullmatch, texts)):
            found[key] = [(float(text), run.final_pass_at_1 or 0.0) for text, run in zip(texts, runs, strict=True)]
    return found if any(len({x for x, _ in pairs}) >= MIN_SEARCHED for pairs in found.values()) else {}


def draw_search(points: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """Final pass@1 over each number that was searched; a logarithmic axis where they span more than a factor of 20."""
    figure = sheet(1 + 4.2 * len(points), 4.2, f"search {title}", "a point for each run")
    figure.set_layout_engine("constrained", rect=(0.01, 0.01, 0.98, 0.82))
    for axes, (key, pairs) in zip(figure.subplots(1, len(points), squeeze=False)[0], points.items(), strict=True):
        values, scores = zip(*pairs, strict=True)
        style(axes)
        axes.xaxis.set_major_locator(AutoLocator())
        axes.plot(values, scores, "o", color=BLUE, alpha=0.7)
        if min(values) > 0 and max(values) > 20 * min(values):
            axes.set_xscale("log")
        label(axes, key, "final pass@1", legend_rows=0)
        axes.set_xlabel("")
        fit(axes, "share")
    return figure


def draw_sweep(measured: Sequence[Configuration], title: str) -> Figure:
    """The mean pass@1 over training, and its end, best first; the best five have a colour each. Where configurations
    have seeds in common, also how far each is from that of the first run, seed by seed: most of the spread between
    seeds is common to all.
    """
    half = MAX_LABEL // 2
    names = [each.name for each in measured]
    labels = [name if len(name) <= MAX_LABEL else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    height = max(4.6, 1.9 + ROW_INCHES * len(measured))
    first = min((run for each in measured for run in each.counted), key=lambda run: by_number(run.name))
    base = next(each for each in measured if first in each.runs)
    pairs = [same_seeds(base, each) for each in measured]
    is_paired = len(measured) > 1 and min(map(len, pairs)) > 1
    figure = sheet(12 + 4.5 * is_paired + LETTER_INCHES * max(map(len, labels)), height, f"sweep {title}")
    figure.set_layout_engine("constrained", rect=(0.01, 0.01, 0.98, 1 - 0.75 / height), wspace=0.05)
    curves, ends, *others = figure.subplots(1, 2 + is_paired)
    colors = [*BEST_COLORS, *[GREY] * len(measured)][: len(measured)]
    for axes in (curves, ends, *others):
        style(axes)
    label(curves, "Held-out pass@1, mean over seeds", "share of problems", legend_rows=0)
    for each, color in reversed([*zip(measured, colors, strict=True)]):  # the best on top
        steps, values = mean_curve([run.pass_at_1 for run in each.counted])
        if len(values) >= MIN_SEEDS and color != GREY:
            band(curves, steps, *share_interval(values), color)
        curves.plot(steps, values.mean(0), color=color, linewidth=1.8, marker="o", markersize=3.5)
    fit(curves, "share")
    left, right = curves.dataLim.intervalx
    curves.set_xlim(left - 0.03 * (right - left or 1), right + 0.03 * (right - left or 1))
    label(ends, "At the end, with 95% interval", "", legend_rows=0)
    finals = [[run.final_pass_at_1 or 0.0 for run in each.counted] for each in measured]
    _dots(ends, finals, [each.interval for each in measured], colors, "pass@1 (bars: single runs)", labels)
    for axes in others:
        values, intervals = zip(*map(difference, pairs), strict=True)
        axes.axvline(0, color=GREY, linewidth=1)
        label(axes, f"Difference from {labels[measured.index(base)]}", "", legend_rows=0)
        _dots(axes, values, intervals, colors, "paired by seed, with 95% interval", [""] * len(measured))
    return figure


def _dots(
    axes: Axes,
    values: Sequence[Any],
    intervals: Sequence[tuple[Any, Any] | None],
    colors: Sequence[str],
    unit: str,
    names: list[str],
) -> None:
    """A row for each configuration: a bar for each run, their mean, and its interval."""
    for row, (own, interval, color) in enumerate(zip(values, intervals, colors, strict=True)):
        axes.plot(own, [row] * len(own), "|", color=color, alpha=0.6, markersize=9)
        if interval is not None:
            axes.hlines(row, *interval, color=color, linewidth=1.8, alpha=0.5)
        axes.plot([np.mean(own)], [row], "o", color=color, markersize=6)
    rows(axes, names, unit)
    low, high = axes.dataLim.intervalx
    margin = 0.05 * max(high - low, 0.02)
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_formatter(PERCENT)
