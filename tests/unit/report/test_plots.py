from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from offline_grpo.report.figures import running_mean
from offline_grpo.report.history import History
from offline_grpo.report.plots import draw_report, save_report
from offline_grpo.report.run_files import about


def synthetic(run_dir: Path, iterations: int, *, with_extras: bool = True) -> History:
    extras = {
        "entropy": 1.0,
        "clip_frac": 0.02,
        "completion_tokens_mean": 100.0,
        "truncated_frac": 0.1,
        "mismatch/kl_k3": 0.001,
        "time/generate_s": 8.0,
        "time/train_s": 4.0,
        "time/eval_s": 2.0,
        "success_rate": 0.5,
        "num_groups": 8.0,
        "num_groups_zero_signal": 2.0,
        "reward/correct": 0.5,
        "reward/format": 0.1,
        "perf/generate_tokens_per_s": 1000.0,
        "perf/train_tokens_per_s": 2000.0,
    }
    train = {
        i: {"reward_mean": i / 10, "reward_std": 0.5, "kl_divergence": 0.01 * i, "grad_norm": 0.5, "lr": 1e-6}
        | (extras if with_extras else {})
        for i in range(iterations)
    }
    evals = {i: {"pass@1": 0.3, "pass@1_low": 0.2, "pass@1_high": 0.4, "pass@4": 0.6} for i in range(-1, iterations, 2)}
    return History(run_dir, train, evals)


def panels(history: History) -> dict[str, Axes]:
    figure = draw_report(history)
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def texts(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in [*axes.texts, *(legend.get_texts() if legend else [])]]


def test_panels_axes_and_legends(tmp_path: Path) -> None:
    drawn = panels(synthetic(tmp_path, 6))
    assert {title: (axes.get_ylabel(), texts(axes)) for title, axes in drawn.items()} == {
        "Held-out pass@k with 95% interval": ("share of problems", ["pass@1", "pass@4"]),
        "Training reward": ("reward", ["mean ± std"]),
        "Parts of the reward": ("reward", ["correct", "format"]),
        "Success rate in training": ("share of completions", []),
        "Groups without signal": ("share of groups", []),
        "KL divergence": ("nats per token", ["policy to reference", "engine to trainer"]),
        "Policy entropy": ("nats per token", []),
        "Clipped tokens": ("share of tokens", []),
        "Completion length": ("tokens", ["mean length", "cut off (right)"]),
        "Gradient norm and learning rate": ("norm before clipping", ["gradient norm", "learning rate (right)"]),
        "Throughput of each phase": ("tokens per second", ["generate", "train"]),
        "Time per iteration": ("seconds", ["generate", "train", "eval"]),
    }
    assert {axes.get_xlabel() for axes in drawn.values()} == {"completed iterations"}


def test_training_and_evaluation_share_the_axis(tmp_path: Path) -> None:
    drawn = panels(synthetic(tmp_path, 6))
    assert drawn["Training reward"].lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    assert drawn["Held-out pass@k with 95% interval"].lines[0].get_xdata().tolist() == [0, 2, 4, 6]
    assert len({axes.get_xlim() for axes in drawn.values()}) == 1


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    drawn = panels(synthetic(tmp_path, 3, with_extras=False))
    silent = {title for title, axes in drawn.items() if texts(axes) == ["not recorded"]}
    assert silent == {
        *("Parts of the reward", "Success rate in training", "Groups without signal", "Completion length"),
        *("Policy entropy", "Clipped tokens", "Throughput of each phase", "Time per iteration"),
    }


def test_a_mixtures_tasks_are_drawn(tmp_path: Path) -> None:
    history = synthetic(tmp_path, 4)
    names = ("countdown", "a_task_of_a_long_name")
    evals = {i: metrics | {f"task/{name}/pass@1": 0.1 * i for name in names} for i, metrics in history.evals.items()}
    axes = panels(History(tmp_path, history.train, evals))["Held-out pass@1 of all and of each task"]
    assert texts(axes) == ["pass@1", "a_task_of_a_…", "countdown"]
    assert axes.lines[-1].get_ydata().tolist() == pytest.approx([0.1 * i for i in history.evals])


def extent(axes: Axes) -> tuple[float, float]:
    """The lowest and highest point of everything that is drawn in it."""
    values = [y for line in axes.lines for y in line.get_ydata()]
    values += [y for drawn in axes.collections for path in drawn.get_paths() for y in path.vertices[:, 1]]
    values += [y for bar in axes.patches for y in (bar.get_y(), bar.get_y() + bar.get_height())]
    return min(values), max(values)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-6, -2e5])
@pytest.mark.parametrize("iterations", [1, 100])
def test_no_curve_lies_on_an_edge_or_under_a_legend(value: float, iterations: int, tmp_path: Path) -> None:
    history = synthetic(tmp_path, iterations)
    train = {i: dict.fromkeys(metrics, value) for i, metrics in history.train.items()}
    evals = {i: dict.fromkeys(metrics, value) for i, metrics in history.evals.items()}
    figure = draw_report(History(tmp_path, train, evals))
    for axes in figure.axes:
        if "not recorded" in texts(axes):  # no phase took any time
            continue
        low, high = axes.get_ylim()
        found = extent(axes)
        margin = 0.03 * (high - low)
        assert low + margin < found[0] <= found[1] < high - margin, axes.get_title(loc="left")
        if (legend := axes.get_legend()) is not None:
            assert legend.get_window_extent().y0 >= axes.bbox.y1 - 1, axes.get_title(loc="left")


def test_the_title_names_task_model_loss_and_learning_rate(tmp_path: Path) -> None:
    history = synthetic(tmp_path / "day" / "time", 2)
    size = "day/time    2 training iterations, 2 evaluations"
    assert [text.get_text() for text in draw_report(history).texts] == ["day/time", size]
    hydra = history.run_dir / ".hydra"
    hydra.mkdir(parents=True)
    choices = {"task": "gsm8k", "model": "hf", "train/loss": "dapo", "rollouts": "on_policy"}
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    model = {"train_id": "Qwen/Qwen2.5-0.5B", "lora": {"r": 16}}
    (hydra / "config.yaml").write_text(yaml.safe_dump({"model": model, "train": {"lr": 1.0e-05}}))
    assert draw_report(history).texts[0].get_text() == "gsm8k,  Qwen2.5-0.5B,  LoRA rank 16,  dapo,  lr 1e-05"
    choices["rollouts"] = "replay"
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (hydra / "config.yaml").write_text(yaml.safe_dump({"model": {"train_id": None}, "train": {"lr": 3.0e-04}}))
    assert about(history.run_dir) == "gsm8k,  hf,  rollouts replay,  dapo,  lr 0.0003"


@pytest.mark.parametrize("iterations", [0, 1, 300])
def test_the_picture_is_drawn_for_short_and_long_runs(tmp_path: Path, iterations: int) -> None:
    path = save_report(synthetic(tmp_path, iterations))
    assert path == tmp_path / "report.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] > 1900
    assert pixels[..., :3].std() > 0.02, "something is on it"


def test_running_mean_is_a_centred_window_cut_at_the_ends() -> None:
    assert running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == pytest.approx([1.5, 3.0, 3.0, 3.0])


@pytest.mark.parametrize(("factor", "iterations"), [(1.0, 6), (123.4, 100), (1e-2, 1)])
def test_no_panel_reaches_into_another(factor: float, iterations: int, tmp_path: Path) -> None:
    """Their places are fixed; labels of any width have room."""
    history = synthetic(tmp_path, iterations)
    times = {f"time/{phase}_s": 0.1 for phase in ("generate", "train", "sync", "eval", "checkpoint")}
    parts = {f"reward/a_part_with_a_long_name_{i}": 0.5 for i in range(9)}
    train = {
        i: {key: value * factor for key, value in metrics.items()} | times | parts
        for i, metrics in history.train.items()
    }
    ks = {f"pass@{k}": 0.5 for k in (1, 2, 4, 8, 16, 32, 64)}
    history = History(history.run_dir, train, {i: metrics | ks for i, metrics in history.evals.items()})
    figure = draw_report(history)
    boxes: dict[Any, list[Any]] = {}
    for axes in figure.axes:  # twins stand in one place
        boxes.setdefault(axes.get_position().bounds, []).append(axes.get_tightbbox())
    panels = [Bbox.union(found) for found in boxes.values()]
    assert len(panels) == 12
    heads = [text.get_window_extent() for text in figure.texts]
    assert not [(head, panel) for head in heads for panel in panels if head.overlaps(panel)]
    assert not [(a, b) for a, b in combinations(panels, 2) if a.overlaps(b)]
    assert all(
        figure.bbox.x0 <= panel.x0 and panel.x1 <= figure.bbox.x1 and figure.bbox.y0 <= panel.y0 for panel in panels
    )
