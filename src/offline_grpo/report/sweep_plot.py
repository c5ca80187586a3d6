"""Draws `sweep.png`: the configurations of a sweep beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offline_grpo.report.configurations import MIN_SEEDS, Configuration, share_interval, short_overrides
from offline_grpo.report.style import COLORS, GREY, PERCENT, RULE, TEXT, band, fit, label, style

BEST_COLORS = [color for color in COLORS if color != GREY]
MAX_LABEL = 48  # letters of a configuration beside the plot
ROW_INCHES, LETTER_INCHES = 0.34, 0.075


def save_sweep_plot(multirun_dir: Path, found: Sequence[Configuration]) -> Path | None:
    """Draw into `multirun_dir/sweep.png`. Returns the path; None where no run measured pass@1."""
    measured = [each for each in found if each.pass_at_1 is not None]
    if not measured:
        return None
    path = multirun_dir / "sweep.png"
    draw_sweep(measured, "/".join(multirun_dir.resolve().parts[-2:])).savefig(path, dpi=110)
    return path


def draw_sweep(measured: Sequence[Configuration], title: str) -> Figure:
    """On the left the mean pass@1 over the sweep's runs, on the right its end, best first; the best five have a colour
    each.
    """
    labels = short_labels(measured)
    label_inches = LETTER_INCHES * max(map(len, labels))
    width, height = 6.4 + 0.4 + label_inches + 5.2, max(4.6, 1.9 + ROW_INCHES * len(measured))  # inches
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    bottom, top = 0.62 / height, 1 - 1.05 / height
    curves = figure.add_axes((0.8 / width, bottom, 5.5 / width, top - bottom))
    ends = figure.add_axes(((6.9 + label_inches) / width, bottom, 4.8 / width, top - bottom))
    colors = [BEST_COLORS[i] if i < len(BEST_COLORS) else GREY for i in range(len(measured))]
    for axes in (curves, ends):
        style(axes)
    label(curves, "Held-out pass@1, mean over seeds", "share of problems", legend_rows=0)
    means = [each.curve()[2].tolist() for each in measured]
    for i, each in reversed(list(enumerate(measured))):  # the best on top
        _curve(
            curves,
            each,
            colors[i],
            num_hidden=means[i + 1 : len(BEST_COLORS)].count(means[i]),
            is_best=colors[i] is not GREY,
        )
    fit(curves, is_share=True)
    left, right = curves.dataLim.intervalx
    curves.set_xlim(left - 0.03 * (right - left or 1), right + 0.03 * (right - left or 1))
    label(ends, "At the end, with 95% interval over seeds", "", legend_rows=0)
    _ends(ends, measured, labels, colors)
    figure.text(
        0.2 / width, 1 - 0.3 / height, f"sweep {title}", fontsize=13, color=TEXT, va="center", fontweight="bold"
    )
    return figure


def _curve(axes: Axes, each: Configuration, color: str, *, num_hidden: int, is_best: bool) -> None:
    """The mean, dashed where `num_hidden` equal ones of the best lie below it, so that all of them show."""
    steps, values, mean = each.curve()
    if not len(steps):
        return
    if len(values) >= MIN_SEEDS and is_best:
        band(axes, steps, *share_interval(values), color)
    elif len(values) > 1 and is_best:
        axes.plot(steps, values.T, color=color, linewidth=0.8, alpha=0.4)
    dashes = (0, (4, 4 * num_hidden)) if is_best and num_hidden else "solid"
    look: dict[str, Any] = (
        {"linewidth": 1.8, "linestyle": dashes, "marker": "o", "markersize": 3.5}
        if is_best
        else {"linewidth": 0.9, "alpha": 0.6}
    )
    axes.plot(steps, mean, color=color, **look)


def _ends(axes: Axes, measured: Sequence[Configuration], labels: Sequence[str], colors: Sequence[str]) -> None:
    for row, (each, color) in enumerate(zip(measured, colors, strict=True)):
        finals = [value for run in each.counted if (value := run.final_pass_at_1) is not None]
        axes.plot(finals, [row] * len(finals), "|", color=color, alpha=0.6, markersize=9)
        if each.low is not None and each.high is not None:
            axes.hlines(row, each.low, each.high, color=color, linewidth=1.8, alpha=0.5)
        axes.plot([sum(finals) / len(finals)], [row], "o", color=color, markersize=6)
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.set_yticks(range(len(measured)), labels, fontsize=9)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    low, high = axes.dataLim.intervalx
    margin = 0.05 * max(high - low, 0.02)
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.set_xlabel("pass@1 (bars: single runs)", fontsize=9, color=TEXT)


def short_labels(found: Sequence[Configuration]) -> list[str]:
    """`lr=1e-5, kl_coef=0.1`, cut in the middle where too long."""
    texts = [
        ", ".join(f"{name}={value}" for name, value in each.items()) or "all alike" for each in short_overrides(found)
    ]
    return [
        text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL // 2 - 1]}…{text[-MAX_LABEL // 2 :]}" for text in texts
    ]
