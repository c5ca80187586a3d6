"""Draws `report.png`: twelve panels that summarise a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from offline_grpo.logger.lines import short
from offline_grpo.report.history import History, Series
from offline_grpo.report.run_files import about
from offline_grpo.report.style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    LONG_RUN,
    ORANGE,
    PURPLE,
    RED,
    SMALL_NUMBER,
    TEXT,
    band,
    fit,
    label,
    legend,
    line,
    nothing,
    smooth,
    style,
    twin,
)

PHASE_COLORS = {"generate": BLUE, "train": ORANGE, "sync": GREEN, "eval": PURPLE, "checkpoint": GREY}
PLACES = {"left": 0.052, "right": 0.974, "bottom": 0.042, "top": 0.878, "wspace": 0.56, "hspace": 0.5}
"""Margins as fractions of the figure, and gaps as fractions of a panel. Fixed, because computing the layout for each
run takes seconds.
"""
MAX_NAME = 13  # letters of a name in a legend: three of them fit beside each other
MAX_PARTS = 6  # of the reward, the largest


def save_report(history: History) -> Path:
    """Draw the run into `run_dir/report.png` and return that path."""
    path = history.run_dir / "report.png"
    draw_report(history).savefig(path, dpi=110)
    return path


def draw_report(history: History) -> Figure:
    """The panels as a standalone figure, independent of pyplot's global state."""
    figure = Figure(figsize=(18, 13), facecolor="white")  # inches
    FigureCanvasAgg(figure)
    drawers = (
        *(_pass_at_k, _reward, _reward_parts, _success),
        *(_signal, _length, _entropy, _kl),
        *(_clip, _gradient, _throughput, _time),
    )
    for axes, draw in zip(figure.subplots(3, 4, gridspec_kw=PLACES).flat, drawers, strict=True):
        style(axes)
        draw(axes, history)
    num_steps = 1 + max([*history.train, *history.evals], default=0)
    for axes in figure.axes:  # the twin axes too
        margin = max(0.03 * num_steps, 0.5)
        axes.set_xlim(-margin, num_steps + margin)
    place = "/".join(history.run_dir.resolve().parts[-2:])
    figure.text(0.008, 0.98, about(history.run_dir) or place, fontsize=15, color=TEXT, va="center", fontweight="bold")
    figure.text(0.008, 0.958, f"{place}    {history.size}", fontsize=10.5, color=TEXT, va="center")
    return figure


def _curves(
    axes: Axes,
    history: History,
    curves: dict[str, tuple[str, str]],
    *,
    legends: bool = True,
    is_share: bool = False,
    ncols: int = 4,
) -> None:
    """Training metrics from zero on: metric -> its name in the legend, and colour."""
    found = {key: series for key in curves if len(series := history.series("train", key))}
    if not found:
        return nothing(axes)
    for key, series in found.items():
        name, color = curves[key]
        line(axes, series, color, name)
    fit(axes, from_zero=True, is_share=is_share)
    return legend(axes, ncols=ncols) if legends else None


def _reward(axes: Axes, history: History) -> None:
    label(axes, "Training reward", "reward")
    mean, std = history.series("train", "reward_mean"), history.series("train", "reward_std")
    if not len(mean):
        return nothing(axes)
    if len(std) == len(mean):
        band(
            axes,
            mean.steps,
            smooth(mean.values - std.values),
            smooth(mean.values + std.values),
            BLUE,
            "± std over rollouts",
        )
    line(axes, mean, BLUE, "mean")
    fit(axes)
    return legend(axes)


def _reward_parts(axes: Axes, history: History) -> None:
    keys = {key for metrics in history.train.values() for key in metrics if key.startswith("reward/")}
    largest = sorted(keys, key=lambda key: (-abs(history.series("train", key).values).max(), key))[:MAX_PARTS]
    label(axes, "Parts of the reward", "reward", legend_rows=1 if len(largest) <= 3 else 2)
    names = [short(key.removeprefix("reward/"), MAX_NAME) for key in largest]
    _curves(
        axes, history, {key: (name, color) for key, name, color in zip(largest, names, COLORS, strict=False)}, ncols=3
    )


def _success(axes: Axes, history: History) -> None:
    label(axes, "Success rate in training", "share of completions")
    _curves(axes, history, {"success_rate": ("", GREEN)}, legends=False, is_share=True)


def _signal(axes: Axes, history: History) -> None:
    """Groups whose rewards are all equal teach nothing."""
    label(axes, "Groups without signal", "share of groups")
    silent, groups = history.series("train", "num_groups_zero_signal"), history.series("train", "num_groups")
    if not len(silent) or len(silent) != len(groups):
        return nothing(axes)
    line(axes, Series(silent.steps, silent.values / np.maximum(groups.values, 1)), RED, "")
    return fit(axes, from_zero=True, is_share=True)


def _pass_at_k(axes: Axes, history: History) -> None:
    """Of a mixture of tasks, pass@1 alone, with that of each task."""
    tasks = history.held_out_tasks()[: len(COLORS) - 1]
    ks = history.eval_ks()[: 1 if tasks else len(COLORS)]
    title = "Held-out pass@1 of all and of each task" if tasks else "Held-out pass@k with 95% interval"
    num_columns = 3 if tasks or len(ks) > 4 else 4
    label(axes, title, "share of problems", legend_rows=1 if len(ks) + len(tasks) <= num_columns else 2)
    if not ks:
        return nothing(axes)
    for k, color in zip(ks, COLORS, strict=False):
        series, low, high = (history.series("eval", f"pass@{k}{end}") for end in ("", "_low", "_high"))
        axes.plot(
            series.steps, series.values, color=color, label=f"pass@{k}", linewidth=1.8, marker="o", markersize=3.5
        )
        if len(low) == len(high) == len(series):
            band(axes, series.steps, low.values, high.values, color)
            axes.vlines(series.steps, low.values, high.values, color=color, alpha=0.4, linewidth=1)
    for task, color in zip(tasks, COLORS[1:], strict=False):
        series = history.series("eval", f"task/{task}/pass@1")
        axes.plot(
            series.steps,
            series.values,
            "--",
            color=color,
            label=short(task, MAX_NAME),
            linewidth=1.3,
            marker="o",
            markersize=3,
        )
    fit(axes, is_share=True)
    return legend(axes, ncols=num_columns)


def _kl(axes: Axes, history: History) -> None:
    label(axes, "KL divergence", "nats per token")
    _curves(
        axes, history, {"kl_divergence": ("policy to reference", RED), "mismatch/kl_k3": ("engine to trainer", GREY)}
    )


def _entropy(axes: Axes, history: History) -> None:
    label(axes, "Policy entropy", "nats per token")
    _curves(axes, history, {"entropy": ("", PURPLE)}, legends=False)


def _clip(axes: Axes, history: History) -> None:
    label(axes, "Clipped tokens", "share of tokens")
    _curves(axes, history, {"clip_frac": ("", ORANGE)}, legends=False, is_share=True)


def _throughput(axes: Axes, history: History) -> None:
    label(axes, "Throughput of each phase", "tokens per second")
    _curves(
        axes, history, {"perf/generate_tokens_per_s": ("generate", BLUE), "perf/train_tokens_per_s": ("train", ORANGE)}
    )


def _length(axes: Axes, history: History) -> None:
    label(axes, "Completion length", "tokens")
    length, truncated = (history.series("train", key) for key in ("completion_tokens_mean", "truncated_frac"))
    if not len(length):
        return nothing(axes)
    line(axes, length, GREEN, "mean length")
    fit(axes, from_zero=True)
    if not len(truncated):
        return legend(axes)
    right = twin(axes, "share of completions")
    line(right, truncated, GREY, "ended at the token limit (right)")
    fit(right, from_zero=True, is_share=True, headroom_frac=0.2)
    return legend(axes, right)


def _gradient(axes: Axes, history: History) -> None:
    label(axes, "Gradient norm and learning rate", "norm before clipping")
    norm, rate = history.series("train", "grad_norm"), history.series("train", "lr")
    if not len(norm):
        return nothing(axes)
    line(axes, norm, RED, "gradient norm")
    fit(axes, from_zero=True)
    if not len(rate):
        return legend(axes)
    right = twin(axes, "learning rate")
    few = len(rate) == 1  # a line of one point is invisible without a marker
    right.plot(
        rate.steps,
        rate.values,
        "--",
        color=GREY,
        linewidth=1.5,
        marker="o",
        markersize=3.5 * few,
        label="learning rate (right)",
    )
    fit(right, from_zero=True, headroom_frac=0.2)
    right.yaxis.set_major_formatter(SMALL_NUMBER)
    return legend(axes, right)


def _time(axes: Axes, history: History) -> None:
    steps, seconds = history.phase_seconds()
    is_long = len(steps) >= LONG_RUN
    label(axes, "Time per iteration", "seconds, running mean" if is_long else "seconds", legend_rows=2)
    if not seconds:
        return nothing(axes)
    bottom = np.zeros_like(steps)
    for phase, values in seconds.items():
        color, top = PHASE_COLORS[phase], bottom + smooth(values)
        if is_long:
            axes.fill_between(steps, bottom, top, color=color, linewidth=0, label=phase)
        else:
            axes.bar(steps, values, width=0.8, bottom=bottom, color=color, label=phase)
        bottom = top
    fit(axes, from_zero=True)
    return legend(axes, ncols=3)
