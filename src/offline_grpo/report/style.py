"""How plots look: colours, axes, legends and margins. No curve may lie on the edge of its panel or under a legend."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from offline_grpo.report.history import FloatArray, Series

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db5", "#e07b27", "#3a9a5c", "#c8433c", "#7d5ba6", "#6b7280"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
AXIS, TEXT, RULE = "#9ca3af", "#374151", "#e5e7eb"
LONG_RUN = 80  # with this many points or more, a line is drawn pale under its running mean
MARGIN_FRAC = 0.06  # of the data's height, left free above and below it
MIN_SHARE_SPAN = 0.05  # a panel of shares is at least this high: a share of 0.1% is not a mountain
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}%")
NUMBER = FuncFormatter(lambda value, _: f"{value:,.6g}")  # matplotlib's own puts a common factor where the legend is
SMALL_NUMBER = FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0")
STEP_LABEL = "completed iterations"


def style(axes: Axes) -> None:
    """Light rules, no frame, whole numbers on the x axis."""
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(NUMBER)
    axes.set_xlabel(STEP_LABEL, fontsize=9, color=TEXT)


def label(axes: Axes, title: str, unit: str, *, legend_rows: int = 1) -> None:
    """The panel's title, above room for the legend, and the unit of its y axis."""
    axes.set_title(title, fontsize=11.5, loc="left", fontweight="bold", pad=10 + 14 * legend_rows)
    axes.set_ylabel(unit, fontsize=9, color=TEXT)


def legend(axes: Axes, *twins: Axes, ncols: int = 4) -> None:
    """One legend for an axes and its twins, between title and plot."""
    pairs = [pair for each in (axes, *twins) for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    spacing: dict[str, Any] = {
        "borderpad": 0.2,
        "borderaxespad": 0.1,
        "handlelength": 1.2,
        "handletextpad": 0.4,
        "columnspacing": 0.9,
    }
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": ncols, "frameon": False}
    axes.legend(handles, labels, fontsize=8.5, labelcolor=TEXT, **place, **spacing)


def line(axes: Axes, series: Series, color: str, name: str, *, dashed: bool = False) -> None:
    """A line with markers if there are few points; a pale line under its running mean if there are many."""
    kind = "--" if dashed else "-"
    if len(series) < LONG_RUN:
        axes.plot(series.steps, series.values, kind, color=color, label=name, linewidth=1.8, marker="o", markersize=3.5)
    else:
        axes.plot(series.steps, series.values, color=color, linewidth=0.7, alpha=0.3)
        axes.plot(series.steps, smooth(series.values), kind, color=color, label=name, linewidth=2)


def band(axes: Axes, steps: FloatArray, low: FloatArray, high: FloatArray, color: str, name: str | None = None) -> None:
    """The area between two curves; a bar where there is one point."""
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0, label=name)
    if len(steps) == 1:
        axes.vlines(steps, low, high, color=color, alpha=0.4, linewidth=1)


def smooth(values: FloatArray) -> FloatArray:
    """The values, or for a long run their running mean over a fortieth of the run."""
    return running_mean(values, len(values) // 40) if len(values) >= LONG_RUN else values


def running_mean(values: FloatArray, width: int) -> FloatArray:
    """The mean of the `width` points around each point (fewer at the ends): [R] -> [R]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start = np.maximum(index - width // 2, 0)
    stop = np.minimum(index + (width + 1) // 2, len(values))
    return (sums[stop] - sums[start]) / (stop - start)


def fit(axes: Axes, *, from_zero: bool = False, is_share: bool = False, headroom_frac: float = 0.0) -> None:
    """Set the y axis to the data and a margin on both sides.

    Args:
        from_zero: have zero in it, so that noise does not look like a trend.
        is_share: percent, and not less than a few of them.
        headroom_frac: of the data's height, free above it, so that two curves on two axes do not cover each other.
    """
    low, high = axes.dataLim.intervaly
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    span = max(high - low, MIN_SHARE_SPAN if is_share else 0.0) or abs(high) or 1.0
    axes.set_ylim(low - MARGIN_FRAC * span, max(high, low + span) + (MARGIN_FRAC + headroom_frac) * span)
    if is_share:
        axes.yaxis.set_major_formatter(PERCENT)


def nothing(axes: Axes, text: str = "not recorded") -> None:
    """Say so in the panel instead of leaving it empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=10)
    axes.set_yticks([])


def twin(axes: Axes, unit: str) -> Axes:
    """A second y axis, on the right."""
    right = axes.twinx()
    assert isinstance(right, Axes)
    right.spines[["top", "left", "bottom"]].set_visible(False)
    right.spines["right"].set_color(AXIS)
    right.tick_params(colors=TEXT, labelsize=9)
    right.set_ylabel(unit, fontsize=9, color=TEXT)
    return right
