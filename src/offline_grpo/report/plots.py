"""Draws `report.png`: eight panels that summarise a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from offline_grpo.report.history import FloatArray, History, Series

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db5", "#e07b27", "#3a9a5c", "#c8433c", "#7d5ba6", "#6b7280"
AXIS, TEXT, RULE = "#9ca3af", "#374151", "#e5e7eb"
PHASE_COLORS = {"generate": BLUE, "train": ORANGE, "sync": GREEN, "eval": PURPLE, "checkpoint": GREY}
PASS_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
STEP_LABEL = "completed iterations"
PLACES = {"left": 0.05, "right": 0.974, "bottom": 0.06, "top": 0.86, "wspace": 0.45, "hspace": 0.44}
"""Margins as fractions of the figure, and gaps as fractions of a panel. Fixed, because computing the layout for each run takes seconds."""
LONG_RUN = 80  # with this many points or more, a line is drawn pale under its running mean
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g} %")
SHORT_NUMBER = FuncFormatter(lambda value, _: f"{value:.2g}")


def save_report(history: History) -> Path:
    """Draw the run into `run_dir/report.png` and return that path."""
    path = history.run_dir / "report.png"
    draw_report(history).savefig(path, dpi=130)
    return path


def draw_report(history: History) -> Figure:
    """The eight panels as a standalone figure, independent of pyplot's global state."""
    figure = Figure(figsize=(18, 8.8), facecolor="white")  # inches
    FigureCanvasAgg(figure)
    drawers = (_reward, _pass_at_k, _kl, _entropy, _clip, _length, _gradient, _time)
    for axes, draw in zip(figure.subplots(2, 4, gridspec_kw=PLACES).flat, drawers, strict=True):
        _style(axes)
        draw(axes, history)
    num_steps = 1 + max([*history.train, *history.evals], default=0)
    for axes in figure.axes:  # the twin axes too
        margin = max(0.03 * num_steps, 0.5)
        axes.set_xlim(-margin, num_steps + margin)
    name = "/".join(history.run_dir.resolve().parts[-2:])
    figure.suptitle(f"{name}    {history.size}", fontsize=12, color=TEXT, x=0.008, ha="left")
    return figure


def _style(axes: Axes) -> None:
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel(STEP_LABEL, fontsize=9, color=TEXT)


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11.5, loc="left", fontweight="bold", pad=24)  # room for the legend below the title
    axes.set_ylabel(unit, fontsize=9, color=TEXT)


def _legend(axes: Axes, *twins: Axes) -> None:
    """One legend for an axes and its twins, in a row between title and plot, where it hides no line."""
    pairs = [pair for each in (axes, *twins) for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=5,
        fontsize=8.5,
        labelcolor=TEXT,
        frameon=False,
        borderpad=0.2,
        borderaxespad=0.1,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.9,
    )


def _line(axes: Axes, series: Series, color: str, label: str) -> None:
    """A line with markers if there are few points; a pale line under its running mean if there are many."""
    if len(series) < LONG_RUN:
        axes.plot(series.steps, series.values, color=color, label=label, linewidth=1.8, marker="o", markersize=3.5)
    else:
        axes.plot(series.steps, series.values, color=color, linewidth=0.7, alpha=0.3)
        axes.plot(series.steps, _smooth(series.values), color=color, label=label, linewidth=2)


def _band(axes: Axes, steps: FloatArray, low: FloatArray, high: FloatArray, color: str, label: str | None = None) -> None:
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0, label=label)
    if len(steps) == 1:  # a single point has no band to fill
        axes.vlines(steps, low, high, color=color, alpha=0.4, linewidth=1)


def _smooth(values: FloatArray) -> FloatArray:
    """The values, or for a long run their running mean over a fortieth of the run."""
    return running_mean(values, len(values) // 40) if len(values) >= LONG_RUN else values


def running_mean(values: FloatArray, width: int) -> FloatArray:
    """The mean of the `width` points around each point (fewer at the ends): [R] -> [R]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start = np.maximum(index - width // 2, 0)
    stop = np.minimum(index + (width + 1) // 2, len(values))
    return (sums[stop] - sums[start]) / (stop - start)


def _from_zero(axes: Axes) -> None:
    """Include zero in the y axis, so that noise does not look like a trend."""
    low, high = axes.get_ylim()
    axes.set_ylim(low if axes.dataLim.ymin < 0 else 0.0, high)


def _nothing(axes: Axes) -> None:
    """Write "not recorded" into the panel instead of leaving it empty."""
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=10)
    axes.set_yticks([])


def _single(axes: Axes, history: History, key: str, color: str, title: str, unit: str) -> None:
    _label(axes, title, unit)
    series = history.series("train", key)
    if not len(series):
        return _nothing(axes)
    _line(axes, series, color, title)
    return _from_zero(axes)


def _reward(axes: Axes, history: History) -> None:
    _label(axes, "Training reward", "reward")
    mean, std = history.series("train", "reward_mean"), history.series("train", "reward_std")
    if not len(mean):
        return _nothing(axes)
    if len(std) == len(mean):
        _band(axes, mean.steps, _smooth(mean.values - std.values), _smooth(mean.values + std.values), BLUE, "± std over rollouts")
    _line(axes, mean, BLUE, "mean")
    return _legend(axes)


def _pass_at_k(axes: Axes, history: History) -> None:
    _label(axes, "Held-out pass@k with 95 % interval", "share of problems")
    if not history.eval_ks():
        return _nothing(axes)
    for k, color in zip(history.eval_ks(), PASS_COLORS, strict=False):
        series, low, high = (history.series("eval", f"pass@{k}{end}") for end in ("", "_low", "_high"))
        axes.plot(series.steps, series.values, color=color, label=f"pass@{k}", linewidth=1.8, marker="o", markersize=3.5)
        if len(low) == len(high) == len(series):
            _band(axes, series.steps, low.values, high.values, color)
            axes.vlines(series.steps, low.values, high.values, color=color, alpha=0.4, linewidth=1)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], -0.02))  # no share is below 0
    axes.yaxis.set_major_formatter(PERCENT)
    return _legend(axes)


def _kl(axes: Axes, history: History) -> None:
    _label(axes, "KL divergence", "nats per token")
    reference, mismatch = history.series("train", "kl_divergence"), history.series("train", "mismatch/kl_k3")
    if not len(reference):
        return _nothing(axes)
    _line(axes, reference, RED, "policy to reference")
    if len(mismatch):
        _line(axes, mismatch, GREY, "engine to trainer")
    _from_zero(axes)
    return _legend(axes)


def _entropy(axes: Axes, history: History) -> None:
    _single(axes, history, "entropy", PURPLE, "Policy entropy", "nats per token")


def _clip(axes: Axes, history: History) -> None:
    _single(axes, history, "clip_frac", ORANGE, "Clipped tokens", "share of tokens")
    axes.yaxis.set_major_formatter(PERCENT)


def _length(axes: Axes, history: History) -> None:
    _label(axes, "Completion length", "tokens")
    length, truncated = (history.series("train", key) for key in ("completion_tokens_mean", "truncated_frac"))
    if not len(length):
        return _nothing(axes)
    _line(axes, length, GREEN, "mean length")
    _from_zero(axes)
    if not len(truncated):
        return _legend(axes)
    right = _twin(axes, "share of completions")
    _line(right, truncated, GREY, "ended at the token limit (right)")
    right.set_ylim(0, max(1.1 * truncated.values.max(), 0.05))
    right.yaxis.set_major_formatter(PERCENT)
    return _legend(axes, right)


def _gradient(axes: Axes, history: History) -> None:
    _label(axes, "Gradient norm and learning rate", "norm before clipping")
    norm, rate = history.series("train", "grad_norm"), history.series("train", "lr")
    if not len(norm):
        return _nothing(axes)
    _line(axes, norm, RED, "gradient norm")
    _from_zero(axes)
    if not len(rate):
        return _legend(axes)
    right = _twin(axes, "learning rate")
    right.plot(
        rate.steps,
        rate.values,
        color=GREY,
        linewidth=1.5,
        linestyle="--",
        marker="o",
        markersize=3.5 if len(rate) == 1 else 0,
        label="learning rate (right)",
    )
    right.set_ylim(0, 1.1 * rate.values.max() or 1.0)
    right.yaxis.set_major_formatter(SHORT_NUMBER)
    return _legend(axes, right)


def _time(axes: Axes, history: History) -> None:
    steps, seconds = history.phase_seconds()
    is_long = len(steps) >= LONG_RUN
    _label(axes, "Time per iteration", "seconds, running mean" if is_long else "seconds")
    if not seconds:
        return _nothing(axes)
    bottom = np.zeros_like(steps)
    for phase, values in seconds.items():
        color, top = PHASE_COLORS[phase], bottom + _smooth(values)
        if is_long:
            axes.fill_between(steps, bottom, top, color=color, linewidth=0, label=phase)
        else:
            axes.bar(steps, values, width=0.8, bottom=bottom, color=color, label=phase)
        bottom = top
    _from_zero(axes)
    return _legend(axes)


def _twin(axes: Axes, unit: str) -> Axes:
    right = axes.twinx()
    assert isinstance(right, Axes)
    right.spines[["top", "left", "bottom"]].set_visible(False)
    right.spines["right"].set_color(AXIS)
    right.tick_params(colors=TEXT, labelsize=9)
    right.set_ylabel(unit, fontsize=9, color=TEXT)
    return right
