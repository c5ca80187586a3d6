"""Draws `report.png`: a run in fifteen panels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from offline_grpo.report.figures import IN_PICTURE, LONG_RUN, Figure, bounds_of, figures, series_of, smooth
from offline_grpo.report.history import History
from offline_grpo.report.run_files import about
from offline_grpo.report.style import band, fit, label, legend, line, nothing, sheet, style

PLACES = {"left": 0.045, "right": 0.99, "bottom": 0.042, "top": 0.878, "wspace": 0.36, "hspace": 0.5}
"""Margins as fractions of the picture, and gaps as fractions of a panel. Fixed, because computing the layout for each
run takes seconds.
"""
NAMES_PER_ROW = 3  # of a legend


def save_report(history: History) -> Path:
    """Draw the run into `run_dir/report.png` and return that path."""
    path = history.run_dir / "report.png"
    draw_report(history).savefig(path, dpi=110)
    return path


def draw_report(history: History) -> Picture:
    """The panels of the figures that belong into the picture."""
    place = "/".join(history.run_dir.resolve().parts[-2:])
    picture = sheet(21, 13, about(history.run_dir) or place, f"{place}    {history.size}")
    panels = picture.subplots(3, 5, gridspec_kw=PLACES).flat
    for axes, figure in zip(panels, figures([history])[:IN_PICTURE], strict=True):
        style(axes)
        (_stacked if figure.stacked else _curves)(axes, history, figure)
    num_steps = 1 + max([*history.train, *history.evals], default=0)
    for axes in picture.axes:
        margin = max(0.03 * num_steps, 0.5)
        axes.set_xlim(-margin, num_steps + margin)
    return picture


def _curves(axes: Axes, history: History, figure: Figure) -> None:
    rows = 1 if len(figure.curves) <= NAMES_PER_ROW else 2
    label(axes, figure.title, figure.unit, legend_rows=rows)
    for (metric, name), color in zip(figure.curves.items(), figure.colors, strict=False):
        series, of_task = series_of(history, metric), metric.startswith("eval/task/")
        if len(series):
            line(axes, series, color, name, "--" if of_task else "-")
            if (bounds := bounds_of(history, metric)) and not of_task:
                low, high = map(smooth, bounds)
                band(axes, series.steps, low, high, color, has_bars=metric.startswith("eval/"))
    if not axes.lines:
        return nothing(axes)
    fit(axes, figure.unit, from_zero=figure.from_zero)
    return legend(axes, ncols=NAMES_PER_ROW if rows > 1 else 4)


def _stacked(axes: Axes, history: History, figure: Figure) -> None:
    """Bars, or areas of running means where there are many iterations."""
    steps = np.array(list(history.train), dtype=np.float64)
    is_long = len(steps) >= LONG_RUN
    label(axes, figure.title, f"{figure.unit}, running mean" if is_long else figure.unit, legend_rows=2)
    parts = history.parts(metric.removeprefix("train/") for metric in figure.curves)
    if not parts:
        return nothing(axes)
    bottom = np.zeros_like(steps)
    for (metric, name), color in zip(figure.curves.items(), figure.colors, strict=True):
        values = parts.get(metric.removeprefix("train/"))
        if values is None:
            continue
        top = bottom + smooth(values)
        if is_long:
            axes.fill_between(steps, bottom, top, color=color, linewidth=0, label=name)
        else:
            axes.bar(steps, values, width=0.8, bottom=bottom, color=color, label=name)
        bottom = top
    fit(axes, figure.unit, from_zero=True)
    return legend(axes, ncols=NAMES_PER_ROW)
