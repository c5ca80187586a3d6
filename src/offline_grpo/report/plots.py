"""Draws `report.png`, a run in fifteen panels; and how all pictures look: no curve lies on the edge of its panel or
under a legend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, MaxNLocator

from offline_grpo.report.figures import (
    GREY,
    IN_PICTURE,
    LONG_RUN,
    Figure,
    bounds_of,
    figures,
    series_of,
    smooth,
)
from offline_grpo.report.history import FloatArray, History, Series
from offline_grpo.report.run_files import about

AXIS, TEXT, RULE = "#9ca3af", "#374151", "#e5e7eb"
MARGIN_FRAC = 0.06  # of the data's height, left free above and below it
MIN_SHARE_SPAN = 0.05  # a panel of shares is at least this high: a share of 0.1% is not a mountain
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}%")
NUMBER = FuncFormatter(lambda value, _: f"{value:,.6g}")  # matplotlib's own puts a common factor where the legend is
SMALL_NUMBER = FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0")
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
    num_steps = 1 + max([*history.train, *history.evals], default=0)
    margin = max(0.03 * num_steps, 0.5)
    for axes, figure in zip(panels, figures([history])[:IN_PICTURE], strict=True):
        style(axes)
        (_stacked if figure.stacked else _curves)(axes, history, figure)
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
    _finish(axes, figure, ncols=NAMES_PER_ROW if rows > 1 else 4)


def _stacked(axes: Axes, history: History, figure: Figure) -> None:
    """Bars, or areas of running means where there are many iterations."""
    steps = np.array(list(history.train), dtype=np.float64)
    is_long = len(steps) >= LONG_RUN
    label(axes, figure.title, f"{figure.unit}, running mean" if is_long else figure.unit, legend_rows=2)
    parts, bottom = history.parts(metric.removeprefix("train/") for metric in figure.curves), np.zeros_like(steps)
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
    _finish(axes, figure, ncols=NAMES_PER_ROW)


def _finish(axes: Axes, figure: Figure, *, ncols: int) -> None:
    """Limits and legend; an empty panel says that it is empty."""
    if axes.has_data():
        fit(axes, figure.unit, from_zero=figure.from_zero)
        legend(axes, ncols=ncols)
        return
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, "not recorded", color=GREY, fontsize=10, **place)
    axes.set_yticks([])


def sheet(width: float, height: float, title: str, below: str = "") -> Picture:
    """A figure of so many inches, independent of pyplot's global state, with a title and a line below it."""
    picture = Picture(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(picture)
    picture.text(0.15 / width, 1 - 0.27 / height, title, fontsize=15, color=TEXT, va="center", fontweight="bold")
    picture.text(0.15 / width, 1 - 0.55 / height, below, fontsize=10.5, color=TEXT, va="center")
    return picture


def style(axes: Axes) -> None:
    """Light rules, no frame, whole numbers on the x axis."""
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(NUMBER)
    axes.set_xlabel("completed iterations", fontsize=9, color=TEXT)


def label(axes: Axes, title: str, unit: str, *, legend_rows: int = 1) -> None:
    """The panel's title, above room for the legend, and the unit of its y axis."""
    axes.set_title(title, fontsize=11.5, loc="left", fontweight="bold", pad=10 + 14 * legend_rows)
    axes.set_ylabel(unit, fontsize=9, color=TEXT)


def legend(axes: Axes, *, ncols: int = 4) -> None:
    """Between title and plot; none where no curve has a name."""
    if axes.get_legend_handles_labels()[0]:
        spacing: dict[str, Any] = {"borderpad": 0.2, "borderaxespad": 0.1, "columnspacing": 0.9}
        spacing |= {"handlelength": 1.2, "handletextpad": 0.4}
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": ncols, "frameon": False}
        axes.legend(fontsize=8.5, labelcolor=TEXT, **place, **spacing)


def line(axes: Axes, series: Series, color: str, name: str, kind: str = "-") -> None:
    """A line with markers if there are few points; a pale line under its running mean if there are many."""
    if len(series) < LONG_RUN:
        axes.plot(series.steps, series.values, kind, color=color, label=name, linewidth=1.8, marker="o", markersize=3.5)
    else:
        axes.plot(series.steps, series.values, color=color, linewidth=0.7, alpha=0.3)
        axes.plot(series.steps, smooth(series.values), kind, color=color, label=name, linewidth=2)


def band(
    axes: Axes, steps: FloatArray, low: FloatArray, high: FloatArray, color: str, *, has_bars: bool = False
) -> None:
    """The area between two curves; with bars at its points, and where there is one."""
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    if len(steps) == 1 or has_bars:
        axes.vlines(steps, low, high, color=color, alpha=0.4, linewidth=1)


def fit(axes: Axes, unit: str, *, from_zero: bool = False) -> None:
    """Set the y axis to the data and a margin on both sides; shares in percent, and not less than a few of them."""
    low, high = axes.dataLim.intervaly
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    is_share = unit.startswith("share")
    span = max(high - low, MIN_SHARE_SPAN if is_share else 0.0) or abs(high) or 1.0
    axes.set_ylim(low - MARGIN_FRAC * span, max(high, low + span) + MARGIN_FRAC * span)
    if is_share:
        axes.yaxis.set_major_formatter(PERCENT)
    elif unit == "learning rate":
        axes.yaxis.set_major_formatter(SMALL_NUMBER)
