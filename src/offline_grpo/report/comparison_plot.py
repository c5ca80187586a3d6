"""Draws `comparison.png`: where the seconds of each mode go, its speed, and reward and GPU memory over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offline_grpo.report.comparison import Arm
from offline_grpo.report.history import PHASES, Series, count
from offline_grpo.report.plots import PHASE_COLORS
from offline_grpo.report.run_files import about
from offline_grpo.report.style import (
    BLUE,
    COLORS,
    GREEN,
    NUMBER,
    ORANGE,
    RULE,
    TEXT,
    fit,
    label,
    legend,
    line,
    nothing,
    style,
)

NAMES = {"generate": "data wait"}  # of phases, where the table says it so
RATES = {
    "generate_tokens_per_s": ("sampling", BLUE),
    "train_tokens_per_s": ("training", ORANGE),
    "tokens_per_s": ("overall", GREEN),
}
PLACES = {"left": 0.085, "right": 0.975, "bottom": 0.075, "top": 0.845, "wspace": 0.24, "hspace": 0.52}
SMALLEST_PART = 0.003  # of the longest bar, to be drawn
END_ROOM = 1.16  # for the number at the end of a bar


def save_comparison_plot(folder: Path, arms: Sequence[Arm]) -> Path:
    """Draw into `folder/comparison.png` and return that path."""
    path = folder / "comparison.png"
    draw_comparison(arms, "/".join(folder.resolve().parts[-2:])).savefig(path, dpi=110)
    return path


def draw_comparison(arms: Sequence[Arm], title: str) -> Figure:
    """Four panels. A mode has the same row in the upper two, and the same colour in the lower two."""
    figure = Figure(figsize=(15, 7.2 + 0.5 * len(arms)), facecolor="white")  # inches
    FigureCanvasAgg(figure)
    (seconds, speed), (reward, memory) = figure.subplots(2, 2, gridspec_kw=PLACES)
    for axes in (seconds, speed, reward, memory):
        style(axes)
    _seconds(seconds, arms)
    _speed(speed, arms)
    _over_time(reward, arms, "reward_mean", "Reward over time", "reward")
    _over_time(memory, arms, "perf/gpu_memory_card_gb", "Memory in use on the trainer's GPU", "GB", from_zero=True)
    figure.text(0.012, 0.968, f"comparison {title}", fontsize=15, color=TEXT, va="center", fontweight="bold")
    numbers = [arm.benchmark.num_steps for arm in arms]
    steps = " to ".join(map(str, sorted({min(numbers), max(numbers)})))
    what = f"{count(len(arms), 'mode')}, {steps} steps each"
    figure.text(
        0.012,
        0.938,
        ",  ".join(filter(None, (about(arms[0].history.run_dir), what))),
        fontsize=10.5,
        color=TEXT,
        va="center",
    )
    return figure


def _seconds(axes: Axes, arms: Sequence[Arm]) -> None:
    """Stacked: what an average step consists of."""
    label(axes, "Seconds per step", "")
    ends = np.zeros(len(arms))
    for phase in PHASES:
        widths = np.array([arm.benchmark.step_s(phase) for arm in arms])
        if widths.max() > SMALLEST_PART * max(arm.benchmark.step_s() for arm in arms):
            axes.barh(
                range(len(arms)),
                widths,
                left=ends,
                color=PHASE_COLORS[phase],
                label=NAMES.get(phase, phase),
                height=0.62,
            )
        ends += widths
    _rows(axes, arms, ends, lambda value: f"{value:,.3g} s", "seconds")
    legend(axes, ncols=5)


def _speed(axes: Axes, arms: Sequence[Arm]) -> None:
    label(axes, "Throughput", "")
    height = 0.8 / len(RATES)
    longest = 0.0
    for place, (name, (text, color)) in enumerate(RATES.items()):
        values = [arm.figures[name] or 0.0 for arm in arms]
        rows = [row + (place - 1) * height for row in range(len(arms))]
        bars = axes.barh(rows, values, color=color, label=text, height=0.9 * height)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8, color=TEXT)
        longest = max(longest, *values)
    _rows(axes, arms, np.full(len(arms), longest), None, "tokens per second")
    legend(axes)


def _rows(axes: Axes, arms: Sequence[Arm], ends: np.ndarray, form: Callable[[float], str] | None, unit: str) -> None:
    """The modes' names on the y axis, the first on top; `form` writes the number at the end of each bar."""
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms], fontsize=10)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    longest = float(ends.max()) or 1.0
    axes.set_xlim(0, END_ROOM * longest)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(NUMBER)
    axes.set_xlabel(unit, fontsize=9, color=TEXT)
    if form is None:
        return
    for row, end in enumerate(ends):
        axes.text(
            end + 0.012 * longest, row, form(float(end)), va="center", fontsize=9.5, color=TEXT, fontweight="bold"
        )


def _over_time(axes: Axes, arms: Sequence[Arm], key: str, title: str, unit: str, *, from_zero: bool = False) -> None:
    """A metric over the minutes since the first step began."""
    label(axes, title, unit, legend_rows=1 if len(arms) <= 4 else 2)
    drawn = False
    for arm, color in zip(arms, COLORS * len(arms), strict=False):
        records = [record for record in arm.history.train.values() if "time/iteration_s" in record]
        minutes = np.cumsum([record["time/iteration_s"] for record in records]) / 60
        has = [key in record for record in records]
        if any(has):
            drawn = True
            line(
                axes,
                Series(minutes[has], np.array([record[key] for record in records if key in record])),
                color,
                arm.name,
            )
    if not drawn:
        return nothing(axes)
    fit(axes, from_zero=from_zero)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes since the first step began", fontsize=9, color=TEXT)
    return legend(axes)
