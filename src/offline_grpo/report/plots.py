"""Every figure of a run, defined once; and `report.png`, which has fifteen of them: no curve lies on the edge of its
panel or under a legend. `page.py` gives all to `report.html`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, MaxNLocator

from offline_grpo.logger.console import short
from offline_grpo.report.runs import PHASES, SILENT, FloatArray, Run

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db5", "#e07b27", "#3a9a5c", "#c8433c", "#7d5ba6", "#6b7280"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
PHASE_COLORS = dict(zip(PHASES, (BLUE, ORANGE, GREEN, PURPLE, GREY), strict=True))
SHARE, NATS, RATE = "share of completions", "nats per token", "tokens per second"
IN_PICTURE = 15  # of the figures
MAX_NAME = 10  # letters of a name in a legend: three of them fit beside each other
LONG_RUN = 80  # with this many points or more, a line is drawn pale under its running mean


@dataclass(frozen=True)
class Figure:
    """Curves over completed iterations."""

    section: str  # of the page: learning, speed or engine
    title: str
    unit: str  # of the y axis; one that begins with "share" is written in percent
    curves: Mapping[str, str]  # metric, such as `train/reward_mean` -> its name in the legend
    colors: Sequence[str] = COLORS
    from_zero: bool = True  # zero is on the y axis, so that noise does not look like a trend
    stacked: bool = False  # the curves are parts of a whole

    def split(self) -> list[Figure]:
        """A figure for each curve; a stacked one stays whole."""
        if self.stacked or len(self.curves) == 1:
            return [self]
        return [replace(self, title=f"{self.title}: {name}", curves={key: name}) for key, name in self.curves.items()]


def figures(runs: Sequence[Run]) -> list[Figure]:
    """All figures of these runs, those of the picture first."""
    # Held-out pass@k; of a mixture of tasks pass@1 alone, with that of each task.
    tasks = sorted({task for run in runs for task in run.tasks()})[: len(COLORS) - 1]
    ks = sorted({k for run in runs for k in run.eval_ks()})[: 1 if tasks else len(COLORS)]
    title = f"Held-out {'pass@k' if len(ks) != 1 else f'pass@{ks[0]}'} with 95% interval"
    curves = {f"eval/pass@{k}": f"pass@{k}" for k in ks}
    curves |= {f"eval/task/{task}/pass@1": short(task, MAX_NAME) for task in tasks}
    title = "Held-out pass@1 of all and of each task" if tasks else title
    held_out = Figure("learning", title, "share of problems", curves, from_zero=False)
    # The reward with its largest parts, and the blocks where routers would have decided otherwise most often.
    reward = Figure("learning", "Training reward", "reward", {"train/reward_mean": "mean ± std"}, from_zero=False)
    parts = {}
    for key in _largest(runs, "reward/", len(COLORS)):
        name = key.removeprefix("train/reward/")
        parts[key] = name if len(name) <= MAX_NAME else short(name.rpartition("/")[2], MAX_NAME)
    blocks = {
        key: key.split("/")[2].replace("_", " ") for key in sorted(_largest(runs, "routes/block_", len(COLORS) - 1))
    }
    differ = {"train/routes/differ_frac": "all"} | blocks
    routing = Figure("learning", "Experts that the policy would not choose", "share of decisions", differ)
    return [held_out, reward, Figure("learning", "Parts of the reward", "reward", parts), *_OF_EVERY_RUN, routing]


def _largest(runs: Sequence[Run], prefix: str, most: int) -> list[str]:
    """The training metrics of this prefix with the largest values."""
    keys = {key for run in runs for key in run.keys("train") if key.startswith(prefix)}
    size = {key: max(abs(run.series(f"train/{key}").values).max(initial=0) for run in runs) for key in keys}
    return [f"train/{key}" for key in sorted(keys, key=lambda key: (-size[key], key))[:most]]


def _one(section: str, title: str, unit: str, metric: str, color: str = BLUE) -> Figure:
    """A single curve."""
    return Figure(section, title, unit, {f"train/{metric}": ""}, [color])


_KL = {
    "train/kl_divergence": "policy to reference",
    "train/mismatch/kl_k3": "engine to trainer",
    "train/distill/reverse_kl": "policy to teacher",
}
_RATES = {"train/perf/generate_tokens_per_s": "generate", "train/perf/train_tokens_per_s": "train"}
_TIMES = {f"train/time/{phase}_s": phase for phase in PHASES}
_MEMORY = {
    "train/perf/gpu_memory_gb": "tensors",
    "train/perf/gpu_memory_reserved_gb": "reserved",
    "train/perf/gpu_memory_card_gb": "all processes",
}
_WAITS = {"train/time/rollouts_wait_s": "for samples", "train/time/scoring_wait_s": "for scores"}
_OF_EVERY_RUN = (
    _one("learning", "Success rate in training", SHARE, "success_rate", GREEN),
    _one("learning", "Groups without signal", "share of groups", SILENT.removeprefix("train/"), RED),
    _one("learning", "Completion length", "tokens", "completion_tokens_mean", GREEN),
    _one("learning", "Cut off at the token limit", SHARE, "truncated_frac", GREY),
    _one("learning", "Policy entropy", NATS, "entropy", PURPLE),
    Figure("learning", "KL divergence", NATS, _KL, [RED, GREY, BLUE]),
    _one("learning", "Clipped tokens", "share of tokens", "clip_frac", ORANGE),
    _one("learning", "Gradient norm", "norm before clipping", "grad_norm", RED),
    _one("learning", "Learning rate", "learning rate", "lr", GREY),
    Figure("speed", "Throughput of each phase", RATE, _RATES),
    Figure("speed", "Time per iteration", "seconds", _TIMES, [*PHASE_COLORS.values()], stacked=True),
    _one("engine", "Logprobs, trainer minus engine", "nats, mean size", "alignment/diff_abs_mean"),
    # Beyond IN_PICTURE: on the page alone.
    Figure("speed", "Memory in use on the trainer's GPU", "GB", _MEMORY),
    Figure("speed", "Waiting", "seconds", _WAITS),
    _one("learning", "Scores that failed", "completions", "scoring/num_failed"),
    _one("engine", "Effective sample size", "share of tokens", "mismatch/ess_frac"),
    _one("engine", "Time of a weight sync", "seconds", "time/sync_s"),
    _one("engine", "Copied by a weight sync", "bytes", "sync/num_bytes"),
    _one("engine", "Probe after a sync, trainer minus engine", "nats, mean size", "sync/probe_diff_abs_mean"),
)


def smooth(values: FloatArray) -> FloatArray:
    """The values, or for a long run their running mean over a fortieth of the run (fewer at the ends): [R] -> [R]."""
    if len(values) < LONG_RUN:
        return values
    window = np.ones(len(values) // 40)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


# report.png

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


def save_report(run: Run) -> Path:
    """Draw the run into `run_dir/report.png` and return that path."""
    path = run.folder / "report.png"
    draw_report(run).savefig(path, dpi=110)
    return path


def draw_report(run: Run) -> Picture:
    """The panels of the figures that belong into the picture, independent of pyplot's global state."""
    picture = Picture(figsize=(WIDTH, HEIGHT), facecolor="white")
    FigureCanvasAgg(picture)
    # The run's settings are the title; its place and length stand below.
    place = "/".join(run.folder.resolve().parts[-2:])
    title = run.about or place
    for inches, text, size, weight in ((0.27, title, 15, "bold"), (0.55, f"{place}    {run.size}", 10.5, "normal")):
        how = {"fontsize": size, "color": TEXT, "va": "center", "fontweight": weight}
        picture.text(0.15 / WIDTH, 1 - inches / HEIGHT, text, **how)
    # All panels have the same iterations on the x axis.
    num_steps = 1 + max([*run.train, *run.evals], default=0)
    margin = max(0.03 * num_steps, 0.5)
    panels = picture.subplots(3, 5, gridspec_kw=PLACES).flat
    for axes, figure in zip(panels, figures([run])[:IN_PICTURE], strict=True):
        _draw(axes, run, figure)
        axes.set_xlim(-margin, num_steps + margin)
    return picture


def _draw(axes: Axes, run: Run, figure: Figure) -> None:
    """One panel: light rules, no frame, whole numbers on the x axis, the title above room for the legend."""
    is_long = figure.stacked and len(run.train) >= LONG_RUN
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
    steps, bottom = np.array(list(run.train), dtype=np.float64), np.zeros(len(run.train))
    parts = run.parts(metric.removeprefix("train/") for metric in figure.curves) if figure.stacked else {}
    for (metric, name), color in zip(figure.curves.items(), figure.colors, strict=False):
        how: dict[str, Any] = {"color": color, "label": name}
        # Parts of a whole: bars, or areas of running means where there are many iterations.
        if figure.stacked:
            if (values := parts.get(metric.removeprefix("train/"))) is None:
                continue
            top = bottom + smooth(values)
            if is_long:
                axes.fill_between(steps, bottom, top, linewidth=0, **how)
            else:
                axes.bar(steps, values, width=0.8, bottom=bottom, **how)
            bottom = top
            continue
        # A curve: few points have markers; many are a pale line under their running mean.
        series, of_task = run.series(metric), metric.startswith("eval/task/")
        kind = "--" if of_task else "-"
        if len(series) >= LONG_RUN:
            axes.plot(series.steps, series.values, color=color, linewidth=0.7, alpha=0.3)
            axes.plot(series.steps, smooth(series.values), kind, linewidth=2, **how)
        elif len(series):
            axes.plot(series.steps, series.values, kind, linewidth=1.8, marker="o", markersize=3.5, **how)
        # Its band, with bars at the points of evaluations, and where there is one point.
        if len(series) and not of_task and (bounds := run.bounds(metric)):
            low, high = map(smooth, bounds)
            axes.fill_between(series.steps, low, high, color=color, alpha=0.15, linewidth=0)
            if len(series) == 1 or metric.startswith("eval/"):
                axes.vlines(series.steps, low, high, color=color, alpha=0.4, linewidth=1)
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
        gaps: dict[str, Any] = {
            "borderpad": 0.2,
            "borderaxespad": 0.1,
            "columnspacing": 0.9,
            "handlelength": 1.2,
            "handletextpad": 0.4,
        }
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0)}
        num_columns = NAMES_PER_ROW if rows > 1 else 4
        axes.legend(ncols=num_columns, frameon=False, fontsize=8.5, labelcolor=TEXT, **place, **gaps)
