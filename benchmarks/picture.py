"""Draws what was measured on H100s and H200s: docs/images/h100.png from the results in `results/h100`, and learning.png
from `results/h200/learning.json`. Needs no GPU.

    python benchmarks/picture.py

Each panel's bars are of one run of one script, but for the pushes, which are of one run of `weight_sync.py` each. The
curves of `learning.py` are means over seeds, and the bands their 95 % intervals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from offline_grpo.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from offline_grpo.report.plots import AXIS, PERCENT, TEXT
from offline_grpo.report.runs import MIN_SEEDS, share_interval

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "h100"
LEARNING = HERE / "results" / "h200" / "learning.json"
IMAGES = HERE.parent / "docs" / "images"
WIDTH, HEIGHT, DPI = 10.0, 5.4, 110


@dataclass(frozen=True)
class Bar:
    """A measured number, where it stands, and whether it is of what the project does."""

    name: str
    file: str
    metric: str
    is_ours: bool = True

    @property
    def value(self) -> float:
        """As the result has it."""
        return float(json.loads((RESULTS / f"{self.file}.json").read_text())["measured"][self.metric])


@dataclass(frozen=True)
class Panel:
    """Bars of one `unit`; on a logarithmic axis where they differ by more than a hundred times."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    is_log: bool = False


PANELS = (
    Panel(
        "An update, skewed lengths",
        "tokens per second",
        (
            Bar("plain PyTorch", "train_speed_skewed", "skewed_plain_tok_s", False),
            Bar("this trainer", "train_speed_skewed", "skewed_auto_tok_s"),
        ),
    ),
    Panel(
        "An update, 16,384 tokens each",
        "tokens per second",
        (
            Bar("plain PyTorch", "train_speed_long", "long_plain_tok_s", False),
            Bar("this trainer", "train_speed_long", "long_lean_tok_s"),
        ),
    ),
    Panel(
        "A whole iteration, 256 completions",
        "seconds; less is better",
        (Bar("TRL with vLLM", "iteration_gpu", "trl_s", False), Bar("this trainer", "iteration_gpu", "ours_s")),
    ),
    Panel(
        "Sampling 256 sequences",
        "tokens per second",
        (
            Bar("vLLM's engine without a server", "generation", "offline_256_tokens_per_s", False),
            Bar("the server of a run", "generation", "server_256_tokens_per_s"),
        ),
    ),
    Panel(
        "Sampling 1,024 sequences",
        "tokens per second",
        (
            Bar("vLLM's engine without a server", "generation", "offline_1024_tokens_per_s", False),
            Bar("the server of a run", "generation", "server_1024_tokens_per_s"),
        ),
    ),
    Panel(
        "New weights reach the server",
        "seconds for 0.5 billion, logarithmic; less is better",
        tuple(
            Bar(name, f"weight_sync_{name}", "push_s", name != "restart")
            for name in ("restart", "reload", "ipc", "lora_hotswap", "shared_vllm")
        ),
        is_log=True,
    ),
)


def draw(axes: Axes, panel: Panel) -> None:
    """One panel: a bar for each number, which stands behind it."""
    values = [bar.value for bar in panel.bars]
    rows = range(len(values), 0, -1)
    axes.barh(rows, values, height=0.42, color=[BLUE if bar.is_ours else GREY for bar in panel.bars])
    axes.set_ylim(0.6, len(values) + 0.75)
    if panel.is_log:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 3, max(values) * 12)
    else:
        axes.set_xlim(0, 1.28 * max(values))
    for row, bar in zip(rows, panel.bars, strict=True):
        text = f"{float(f'{bar.value:.3g}'):,g}"
        axes.annotate(text, (bar.value, row), (4, 0), textcoords="offset points", va="center", color=TEXT, fontsize=9)
        axes.text(
            0.012, row + 0.27, bar.name, transform=axes.get_yaxis_transform(), va="bottom", color=TEXT, fontsize=9
        )
    axes.set_title(panel.title, fontsize=10.5, loc="left", fontweight="bold", x=0, pad=16)
    axes.text(0, 1.02, panel.unit, transform=axes.transAxes, fontsize=9, color=TEXT, va="bottom")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.minorticks_off()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(AXIS)


ARMS = {"grpo": BLUE, "dapo": ORANGE, "dr_grpo": GREEN, "gspo": PURPLE, "cispo": RED, "trl": GREY}
TASKS = {"sums": "Sums", "products": "Products", "instructions": "Instructions"}
MATCHED = ("grpo", "trl")
"""The arms that differ in the trainer alone: only these have bands, so that the panels can be read."""


def draw_curves(axes: Axes, runs: list[dict[str, Any]], arms: Sequence[str], key: str) -> None:
    """Mean held-out pass@1 over seeds for each arm, against the means of `key`: steps or seconds."""
    for arm in arms:
        chosen = [run for run in runs if run["arm"] == arm and run["done"]]
        if not chosen:
            continue
        values = np.array([run["pass@1"] for run in chosen])
        x = np.mean([run[key] for run in chosen], axis=0)
        name = {"trl": "grpo of TRL"}.get(arm, arm)
        axes.plot(
            x, values.mean(0), color=ARMS[arm], label=name, linestyle="--" if arm == "trl" else "-", linewidth=1.6
        )
        if arm in MATCHED and len(chosen) >= MIN_SEEDS:
            low, high = share_interval(values)
            axes.fill_between(x, low, high, color=ARMS[arm], alpha=0.15, linewidth=0)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=9, colors=TEXT, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.set_xlabel({"steps": "iterations", "seconds": "seconds of training"}[key], fontsize=9, color=TEXT)


def draw_learning(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each task, and of the first one the two trainers against time."""
    runs = list(result["details"].values())
    figure, grid = plt.subplots(1, 4, figsize=(WIDTH, 3.0), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    for axes, (task, title) in zip(grid, TASKS.items(), strict=False):
        draw_curves(axes, [run for run in runs if run["task"] == task], list(ARMS), "steps")
        axes.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
    draw_curves(grid[3], [run for run in runs if run["task"] == next(iter(TASKS))], MATCHED, "seconds")
    grid[3].set_title("Sums, by time", fontsize=10.5, loc="left", fontweight="bold")
    grid[0].set_ylabel("held-out pass@1", fontsize=9, color=TEXT)
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS), fontsize=9, frameon=False
    )
    figure.savefig(path, dpi=DPI)
    print(path)


def main() -> None:
    """Draw and save."""
    draw_learning(json.loads(LEARNING.read_text()), IMAGES / "learning.png")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure, grid = plt.subplots(2, 3, figsize=(WIDTH, HEIGHT), height_ratios=(2, 3.4), layout=layout)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        draw(axes, panel)
    figure.savefig(IMAGES / "h100.png", dpi=DPI)
    print(IMAGES / "h100.png")


if __name__ == "__main__":
    main()
