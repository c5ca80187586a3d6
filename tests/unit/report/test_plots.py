from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from offline_grpo.report.history import History
from offline_grpo.report.plots import draw_report, running_mean, save_report


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
        "Training reward": ("reward", ["± std over rollouts", "mean"]),
        "Held-out pass@k with 95 % interval": ("share of problems", ["pass@1", "pass@4"]),
        "KL divergence": ("nats per token", ["policy to reference", "engine to trainer"]),
        "Policy entropy": ("nats per token", []),
        "Clipped tokens": ("share of tokens", []),
        "Completion length": ("tokens", ["mean length", "ended at the token limit (right)"]),
        "Gradient norm and learning rate": ("norm before clipping", ["gradient norm", "learning rate (right)"]),
        "Time per iteration": ("seconds", ["generate", "train", "eval"]),
    }
    assert {axes.get_xlabel() for axes in drawn.values()} == {"completed iterations"}


def test_training_and_evaluation_share_the_axis(tmp_path: Path) -> None:
    drawn = panels(synthetic(tmp_path, 6))
    assert drawn["Training reward"].lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    assert drawn["Held-out pass@k with 95 % interval"].lines[0].get_xdata().tolist() == [0, 2, 4, 6]
    assert len({axes.get_xlim() for axes in drawn.values()}) == 1


def test_time_bars_stand_on_each_other(tmp_path: Path) -> None:
    bars = panels(synthetic(tmp_path, 2))["Time per iteration"].patches
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [(0, 8), (0, 8), (8, 4), (8, 4), (12, 2), (12, 2)]


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    drawn = panels(synthetic(tmp_path, 3, with_extras=False))
    silent = {title for title, axes in drawn.items() if texts(axes) == ["not recorded"]}
    assert silent == {"Policy entropy", "Clipped tokens", "Completion length", "Time per iteration"}


@pytest.mark.parametrize("iterations", [0, 1, 300])
def test_the_picture_is_drawn_for_short_and_long_runs(tmp_path: Path, iterations: int) -> None:
    path = save_report(synthetic(tmp_path, iterations))
    assert path == tmp_path / "report.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] > 2000
    assert pixels[..., :3].std() > 0.02, "something is on it"


def test_running_mean_is_a_centred_window_cut_at_the_ends() -> None:
    assert running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == pytest.approx([1.5, 3.0, 3.0, 3.0])


@pytest.mark.parametrize(("factor", "iterations"), [(1.0, 6), (123.4, 100), (1e-2, 1)])
def test_no_panel_reaches_into_another(factor: float, iterations: int, tmp_path: Path) -> None:
    """Their places are fixed; labels of any width have room."""
    history = synthetic(tmp_path, iterations)
    times = {f"time/{phase}_s": 0.1 for phase in ("generate", "train", "sync", "eval", "checkpoint")}
    train = {i: {key: value * factor for key, value in metrics.items()} | times for i, metrics in history.train.items()}
    figure = draw_report(History(history.run_dir, train, history.evals))
    boxes: dict[Any, list[Any]] = {}
    for axes in figure.axes:  # twins stand in one place
        boxes.setdefault(axes.get_position().bounds, []).append(axes.get_tightbbox())
    panels = [Bbox.union(found) for found in boxes.values()]
    assert len(panels) == 8
    assert not [(a, b) for a, b in combinations(panels, 2) if a.overlaps(b)]
    assert all(figure.bbox.x0 <= panel.x0 and panel.x1 <= figure.bbox.x1 and figure.bbox.y0 <= panel.y0 for panel in panels)
