"""Draws `report.png`, a run in fifteen panels: no curve lies on the edge of its panel or under a legend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, MaxNLocator

from offline_grpo.report.figures import GREY, IN_PICTURE, LONG_RUN, Figure, bounds_of, figures, series_of, smooth
from offline_grpo.report.history import History
from offline_grpo.report.run_files import about

AXIS, TEXT, RULE = "#9ca3af", "#374151", "#e5e7eb"
MARGIN_FRAC = 0.06  # of the data's height, left free above and below it
MIN_SHARE_SPAN = 0.05  # a panel of shares is at least this high: a share of 0.1% is not a mountain
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}%")
NUMBER = FuncFormatter(lambda value, _: f"{value:,.6g}")  # matplotlib's own puts a common factor where the legend is
SMALL_NUMBER = FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0")
WIDTH, HEIGHT = 21, 13  # inches
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
    """The panels of the figures that belong into the picture, independent of pyplot's global state."""
    picture = Picture(figsize=(WIDTH, HEIGHT), facecolor="white")
    FigureCanvasAgg(picture)
    # The run's settings are the title; its place and length stand below.
    place = "/".join(history.run_dir.resolve().parts[-2:])
    title = about(history.run_dir) or place
    for inches, text, size, weight in ((0.27, title, 15, "bold"), (0.55, f"{place}    {history.size}", 10.5, "normal")):
        how = {"fontsize": size, "color": TEXT, "va": "center", "fontweight": weight}
        picture.text(0.15 / WIDTH, 1 - inches / HEIGHT, text, **how)
    # All panels have the same iterations on the x axis.
    num_steps = 1 + max([*history.train, *history.evals], default=0)
    margin = max(0.03 * num_steps, 0.5)
    panels = picture.subplots(3, 5, gridspec_kw=PLACES).flat
    for axes, figure in zip(panels, figures([history])[:IN_PICTURE], strict=True):
        _draw(axes, history, figure)
        axes.set_xlim(-margin, num_steps + margin)
    return picture


def _draw(axes: Axes, history: History, figure: Figure) -> None:
    """One panel: light rules, no frame, whole numbers on the x axis, the title above room for the legend."""
    is_long = figure.stacked and len(history.train) >= LONG_RUN
    rows = 2 if figure.stacked or len(figure.curves) > NAMES_PER_ROW else 1
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("completed iterations", fontsize=9, color=TEXT)
    axes.set_title(figure.title, fontsize=11.5, loc="left", fontweight="bold", pad=10 + 14 * rows)
    axes.set_ylabel(f"{figure.unit}, running mean" if is_long else figure.unit, fontsize=9, color=TEXT)
    (_stack if figure.stacked else _curves)(axes, history, figure)
    # A panel without data says so, and needs no scale.
    if not axes.has_data():
        axes.text(0.5, 0.5, "not recorded", color=GREY, fontsize=10, transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([])
        return
    # The y axis has the data and a margin on both sides; shares are in percent, and not less than a few of them.
    low, high = axes.dataLim.intervaly
    if figure.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    is_share = figure.unit.startswith("share")
    span = max(high - low, MIN_SHARE_SPAN if is_share else 0.0) or abs(high) or 1.0
    axes.set_ylim(low - MARGIN_FRAC * span, max(high, low + span) + MARGIN_FRAC * span)
    axes.yaxis.set_major_formatter(PERCENT if is_share else SMALL_NUMBER if figure.unit == "learning rate" else NUMBER)
    # The legend stands between title and plot, if a curve has a name.
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=NAMES_PER_ROW if rows > 1 else 4,
            frameon=False,
            fontsize=8.5,
            labelcolor=TEXT,
            borderpad=0.2,
            borderaxespad=0.1,
            columnspacing=0.9,
            handlelength=1.2,
            handletextpad=0.4,
        )


def _curves(axes: Axes, history: History, figure: Figure) -> None:
    """Lines with their bands."""
    for (metric, name), color in zip(figure.curves.items(), figure.colors, strict=False):
        series, of_task = series_of(history, metric), metric.startswith("eval/task/")
        kind = "--" if of_task else "-"
        # Few points have markers; many are a pale line under their running mean.
        if len(series) >= LONG_RUN:
            axes.plot(series.steps, series.values, color=color, linewidth=0.7, alpha=0.3)
            axes.plot(series.steps, smooth(series.values), kind, color=color, label=name, linewidth=2)
        elif len(series):
            how = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
            axes.plot(series.steps, series.values, kind, color=color, label=name, **how)
        # A band, with bars at the points of evaluations, and where there is one point.
        if len(series) and not of_task and (bounds := bounds_of(history, metric)):
            low, high = map(smooth, bounds)
            axes.fill_between(series.steps, low, high, color=color, alpha=0.15, linewidth=0)
            if len(series) == 1 or metric.startswith("eval/"):
                axes.vlines(series.steps, low, high, color=color, alpha=0.4, linewidth=1)


def _stack(axes: Axes, history: History, figure: Figure) -> None:
    """Bars, or areas of running means where there are many iterations."""
    steps = np.array(list(history.train), dtype=np.float64)
    parts, bottom = history.parts(metric.removeprefix("train/") for metric in figure.curves), np.zeros_like(steps)
    for (metric, name), color in zip(figure.curves.items(), figure.colors, strict=True):
        if (values := parts.get(metric.removeprefix("train/"))) is None:
            continue
        top = bottom + smooth(values)
        if len(steps) >= LONG_RUN:
            axes.fill_between(steps, bottom, top, color=color, linewidth=0, label=name)
        else:
            axes.bar(steps, values, width=0.8, bottom=bottom, color=color, label=name)
        bottom = top
