"""Draws what was measured: docs/images/h100.png from the results in `results/h100`; learning.png, objectives.png and
calculator.png from `learning.json`, `paired_objectives.json` and `calculator.json` in `results/h200`; tool_demo.png
from `results/tool_demo.json`, pictures.png from `results/learning_pictures.json`. Needs no GPU.

    python benchmarks/picture.py

Each panel's bars are of one run of one script, but for the pushes, which are of one run of `weight_sync.py` each. The
curves of `learning.py` are means over seeds; at their ends stand 95 % intervals over seeds.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from offline_grpo.eval.statistics import FloatArray, mean_interval
from offline_grpo.report.plots import AXIS, BLUE, GREEN, GREY, ORANGE, PERCENT, PURPLE, RED, TEXT

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "h100"
H200 = HERE / "results" / "h200"
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
        (
            Bar("TRL with vLLM", "iteration_gpu_lora", "trl_s", False),
            Bar("this trainer", "iteration_gpu_lora", "ours_s"),
        ),
    ),
    Panel(
        "Sampling 256 sequences",
        "tokens per second",
        (
            Bar("vLLM's engine, with logprobs", "generation", "offline_256_tokens_per_s", False),
            Bar("vLLM's engine, without logprobs", "generation", "offline_bare_256_tokens_per_s", False),
            Bar("the server of a run, with logprobs", "generation", "server_256_tokens_per_s"),
        ),
    ),
    Panel(
        "Sampling 1,024 sequences",
        "tokens per second; more than the cache holds",
        (
            Bar("vLLM's engine, with logprobs", "generation", "offline_1024_tokens_per_s", False),
            Bar("the server of a run, with logprobs", "generation", "server_1024_tokens_per_s"),
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
TRAINERS = {"environment": BLUE, "agent": ORANGE, "async": GREEN, "trl": GREY}
"""Arms of the calculator."""
TASKS = {
    "sums": "Sums",
    "products": "Products",
    "instructions": "Instructions",
    "longer_sums": "Sums of three",
}


def finished(result: Mapping[str, Any], task: str, arm: str) -> list[dict[str, Any]]:
    """The runs of an arm that came to their end."""
    return [run for run in result["details"].values() if (run["task"], run["arm"]) == (task, arm) and run["done"]]


def draw_curves(axes: Axes, result: Mapping[str, Any], task: str, arms: Mapping[str, str], key: str) -> None:
    """Mean held-out pass@1 over seeds for each arm, against the means of `key`: steps or seconds. Each has its interval
    at the end, side by side, so that none hides another.
    """
    for place, (arm, color) in enumerate(arms.items()):
        chosen = finished(result, task, arm)
        values = np.array([run["pass@1"] for run in chosen])
        x = np.mean([run[key] for run in chosen], axis=0)
        name = {"trl": "TRL", "async": "environment, sampled ahead"}.get(arm, arm)
        axes.plot(x, values.mean(0), color=color, label=name, linestyle="--" if arm == "trl" else "-", linewidth=1.4)
        low, high = mean_interval(values[:, -1:])
        beside = x[-1] * (1 + 0.035 * (place + 1))
        axes.vlines(beside, low, high, color=color, linewidth=1.6)
        axes.plot(beside, values[:, -1].mean(), ".", color=color, markersize=5)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8, colors=TEXT, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.set_xlabel({"steps": "iterations", "seconds": "seconds of training"}[key], fontsize=9, color=TEXT)


def draw_learning(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each task, and of the first one the two trainers against time."""
    figure, grid = plt.subplots(1, 5, figsize=(WIDTH, 2.8), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.06))
    panels = [(task, title, ARMS, "steps") for task, title in TASKS.items()]
    matched = {arm: ARMS[arm] for arm in ("grpo", "trl")}  # they differ in the trainer alone
    for axes, (task, title, arms, key) in zip(
        grid, [*panels, ("sums", "Sums, by time", matched, "seconds")], strict=True
    ):
        draw_curves(axes, result, task, arms, key)
        axes.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
    grid[0].set_ylabel("held-out pass@1", fontsize=9, color=TEXT)
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS), fontsize=9, frameon=False
    )
    figure.savefig(path, dpi=DPI)
    print(path)


def draw_calculator(result: Mapping[str, Any], path: Path) -> None:
    """Curves by iteration and by time; then the seconds to each level, with their 95% intervals over seeds."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDTH, 2.8), layout=layout)
    for axes, key, title in ((left, "steps", "By iteration"), (middle, "seconds", "By time")):
        draw_curves(axes, result, "calculator", TRAINERS, key)
        axes.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
    left.set_ylabel("held-out pass@1", fontsize=9, color=TEXT)
    measured, places = result["measured"], {"0.5": 0.6, "0.9": 0.0}
    for row, (arm, color) in enumerate(reversed(TRAINERS.items())):
        for level, place in places.items():
            name, y = f"calculator/{arm}/seconds_to_{level}", 1.4 * row + place
            if name not in measured:  # no seed has reached it
                continue
            right.barh(y, measured[name], height=0.5, color=color, alpha=1.0 if level == "0.5" else 0.55)
            right.hlines(y, *(measured.get(f"{name}/{end}", measured[name]) for end in ("low", "high")), color="black")
    ticks = [(1.4 * row + place, f"to {level}") for row in range(len(TRAINERS)) for level, place in places.items()]
    right.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=8)
    right.set_xlabel("seconds of training", fontsize=9, color=TEXT)
    right.set_title("Seconds to a pass@1", fontsize=10.5, loc="left", fontweight="bold")
    right.tick_params(labelsize=8, colors=TEXT, length=0)
    right.spines[["top", "right"]].set_visible(False)
    right.spines[["left", "bottom"]].set_color(AXIS)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=DPI)
    print(path)


def pairs_of(result: Mapping[str, Any]) -> list[tuple[str, str, FloatArray]]:
    """Every pair of objectives, the better one first, with the differences of their last pass@1 by seed."""
    last = {
        name: {run["seed"]: run["pass@1"][-1] for run in finished(result, "replay", name)}
        for name in objectives_of(result)
    }
    return [
        (a, b, np.array([last[a][seed] - last[b][seed] for seed in sorted(last[a].keys() & last[b].keys())]))
        for a, b in itertools.combinations(last, 2)
    ]


def objectives_of(result: Mapping[str, Any]) -> list[str]:
    """Their names, the best first."""
    last = {key.split("/")[1]: value for key, value in result["measured"].items() if re.match("replay/.*/last", key)}
    return sorted(last, key=lambda name: -last[name])


def draw_objectives(result: Mapping[str, Any], path: Path) -> None:
    """Curves of each objective's seeds; then the differences of all pairs, with their 95% intervals."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 4.4), width_ratios=(1, 1.25), layout=layout)
    for name, color in zip(objectives_of(result), (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, "black"), strict=False):
        curves = finished(result, "replay", name)
        steps, values = curves[0]["steps"], np.array([curve["pass@1"] for curve in curves])
        left.plot(steps, values.T, color=color, linewidth=0.7, alpha=0.5)
        left.plot(steps, values.mean(0), color=color, linewidth=2, label=name)
    left.set_title("Held-out pass@1 of each seed, and means", fontsize=10.5, loc="left", fontweight="bold")
    left.set_xlabel("iterations on the same recorded rollouts", fontsize=9, color=TEXT)
    left.legend(fontsize=8, frameon=False)
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(PERCENT)
    pairs = pairs_of(result)
    for row, (_, _, differences) in enumerate(reversed(pairs)):
        low, high = (float(end[0]) for end in mean_interval(differences[:, None]))
        color = BLUE if low > 0 or high < 0 else GREY
        right.hlines(row, low, high, color=color, linewidth=2)
        right.plot(differences.mean(), row, "o", color=color, markersize=4)
    right.axvline(0, color=AXIS, linewidth=1)
    right.set_yticks(range(len(pairs)), [f"{a} - {b}" for a, b, _ in reversed(pairs)], fontsize=7.5)
    right.set_title("All 21 differences after 60, paired by seed", fontsize=10.5, loc="left", fontweight="bold")
    right.set_xlabel("pass@1, with 95% intervals of each pair alone", fontsize=9, color=TEXT)
    right.xaxis.set_major_formatter(PERCENT)
    for axes in (left, right):
        axes.tick_params(labelsize=8, colors=TEXT, length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(AXIS)
    figure.savefig(path, dpi=DPI)
    print(path)


def draw_demo(result: Mapping[str, Any], path: Path) -> None:
    """Each evaluation against time, and an episode before and after: what was sampled in colour, all else in grey."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.0), width_ratios=(1, 2.1), layout=layout)
    curve = result["details"]["evaluations"]
    low, middle, high = (np.array([each[f"pass@1{end}"] for each in curve]) for end in ("_low", "", "_high"))
    minutes = [each["seconds"] / 60 for each in curve]
    left.errorbar(minutes, middle, yerr=(middle - low, high - middle), color=BLUE, marker="o", markersize=4, capsize=2)
    left.set_title("Held-out pass@1", fontsize=10.5, loc="left", fontweight="bold")
    left.set_xlabel("minutes since the command, two cores", fontsize=9, color=TEXT)
    left.set_ylim(0, 1.03)
    left.set_xlim(left=0)
    left.yaxis.set_major_formatter(PERCENT)
    left.tick_params(labelsize=8, colors=TEXT, length=0)
    left.spines[["top", "right"]].set_visible(False)
    left.spines[["left", "bottom"]].set_color(AXIS)
    row, rows = 0.0, []
    for title, turns in zip(("Before", "After"), result["details"]["episodes"], strict=True):
        rows.append((row, title, TEXT, "bold"))
        for who, text in turns:
            color = BLUE if who == "policy" else GREY
            shown = text.replace("<|im_end|>", "\n").replace("<|im_start|>", "").split("\n")
            for line in (part for each in shown if each.strip() for part in textwrap.wrap(each, 108)):
                row += 1
                rows.append((row, line, color, "normal"))
        row += 1.5
    for row, text, color, weight in rows:
        right.text(0, row, text, color=color, fontweight=weight, fontsize=8, va="top", family="monospace")
    right.set_ylim(row + 1, 0)
    right.set_axis_off()
    figure.savefig(path, dpi=DPI)
    print(path)


def draw_pictures(result: Mapping[str, Any], path: Path) -> None:
    """Some sums as the model sees them, and how both trainers teach it to add them."""
    from PIL import Image

    from offline_grpo.task.picture_sums import PictureSums
    from offline_grpo.types import Split

    sizes = {name: result["settings"][name] for name in ("max_operand", "picture_size", "prompt_template")}
    task = PictureSums(operations=["+"], eval_frac=0.2, format_weight=0.0, **sizes)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH * 0.72, 2.6), width_ratios=(1, 1.3), layout=layout)
    for row, problem in enumerate(task.problems(Split.EVAL)[i] for i in (3, 40, 90)):
        for column, picture in enumerate(problem.pictures):
            place = (1.4 * column, 1.4 * column + 1, 3 - 1.25 * row, 4 - 1.25 * row)
            left.imshow(Image.open(BytesIO(picture.data)), cmap="gray", vmin=0, vmax=255, extent=place)
        for x, text in ((1.1, "+"), (2.5, f"= {problem.answer}")):
            left.text(x, 3.4 - 1.25 * row, text, fontsize=15, color=TEXT, fontfamily="monospace")
    left.set(xlim=(-0.1, 4.4), ylim=(0.3, 4.2))
    left.axis("off")
    iterations = [i * result["settings"]["iterations"] / 2 for i in range(3)]
    for arm, name, colour in (("ours", "ours", BLUE), ("trl", "TRL 1.16", ORANGE)):
        curves = np.array(result["details"][arm])
        low, high = mean_interval(curves)
        right.plot(iterations, curves.mean(0), color=colour, label=name)
        right.fill_between(iterations, low, high, color=colour, alpha=0.2, linewidth=0)
    right.set_ylabel("held-out pass@1", fontsize=9, color=TEXT)
    right.set_xlabel("iterations", fontsize=9, color=TEXT)
    right.legend(fontsize=9, frameon=False, loc="lower right")
    figure.savefig(path, dpi=DPI)
    print(path)


def main() -> None:
    """Draw and save."""
    for name, file, draw_it in (
        ("learning", H200 / "learning.json", draw_learning),
        ("objectives", H200 / "paired_objectives.json", draw_objectives),
        ("calculator", H200 / "calculator.json", draw_calculator),
        ("pictures", HERE / "results" / "learning_pictures.json", draw_pictures),
        ("tool_demo", HERE / "results" / "tool_demo.json", draw_demo),
    ):
        if file.exists():
            draw_it(json.loads(file.read_text()), IMAGES / f"{name}.png")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure, grid = plt.subplots(2, 3, figsize=(WIDTH, HEIGHT), height_ratios=(2, 3.4), layout=layout)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        draw(axes, panel)
    figure.savefig(IMAGES / "h100.png", dpi=DPI)
    print(IMAGES / "h100.png")


if __name__ == "__main__":
    main()
