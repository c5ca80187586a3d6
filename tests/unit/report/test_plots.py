from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from offline_grpo.report.plots import draw_report, figures, smooth
from offline_grpo.report.runs import Run

EXTRAS = (
    {"entropy": 1.0, "clip_frac": 0.02, "completion_tokens_mean": 100.0, "truncated_frac": 0.1}
    | {"mismatch/kl_k3": 0.001, "time/generate_s": 8.0, "time/train_s": 4.0, "time/eval_s": 2.0, "success_rate": 0.5}
    | {"num_groups": 8.0, "num_groups_zero_signal": 2.0, "reward/correct": 0.5, "reward/format": 0.1}
    | {"perf/generate_tokens_per_s": 1000.0, "perf/train_tokens_per_s": 2000.0, "alignment/diff_abs_mean": 0.01}
)


def synthetic(run_dir: Path, iterations: int, *, with_extras: bool = True) -> Run:
    more = EXTRAS if with_extras else {}
    train = {
        i: {"reward_mean": i / 10, "reward_std": 0.5, "kl_divergence": 0.01 * i, "grad_norm": 0.5, "lr": 1e-6} | more
        for i in range(iterations)
    }
    evals = {i: {"pass@1": 0.3, "pass@1_low": 0.2, "pass@1_high": 0.4, "pass@4": 0.6} for i in range(-1, iterations, 2)}
    return Run(run_dir, train, evals)


def panels(run: Run) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in draw_report(run).axes}


def texts(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in [*axes.texts, *(legend.get_texts() if legend else [])]]


def test_panels_axes_and_legends(tmp_path: Path) -> None:
    drawn = panels(synthetic(tmp_path, 6))
    assert len(drawn) == 15
    assert {title: texts(axes) for title, axes in drawn.items() if texts(axes)} == {
        "Held-out pass@k with 95% interval": ["pass@1", "pass@4"],
        "Training reward": ["mean ± std"],
        "Parts of the reward": ["correct", "format"],
        "KL divergence": ["policy to reference", "engine to trainer"],
        "Throughput of each phase": ["generate", "train"],
        "Time per iteration": ["generate", "train", "eval"],
    }
    assert drawn["Training reward"].lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    assert drawn["Held-out pass@k with 95% interval"].lines[0].get_xdata().tolist() == [0, 2, 4, 6]
    assert len({axes.get_xlim() for axes in drawn.values()}) == 1
    bare = panels(synthetic(tmp_path, 3, with_extras=False)).values()
    assert sum(texts(axes) == ["not recorded"] for axes in bare) == 10


def test_routers_are_shown_where_they_differ_most(tmp_path: Path) -> None:
    shares = {f"routes/block_{n:02d}/differ_frac": 0.01 * (n * 5 % 8) for n in range(8)} | {"routes/differ_frac": 0.03}
    run = Run(tmp_path, {0: shares, 1: shares}, {})
    [figure] = [figure for figure in figures([run]) if "train/routes/differ_frac" in figure.curves]
    assert [*figure.curves.values()] == ["all", "block 01", "block 03", "block 04", "block 06", "block 07"]


def test_long_series_are_smoothed_by_a_centred_window_cut_at_the_ends() -> None:
    values = np.arange(120.0) % 3
    assert smooth(values)[:3].tolist() == pytest.approx([0.5, 1.0, 1.0])
    assert smooth(values[:79]).tolist() == values[:79].tolist()
