import itertools
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from offline_grpo.report.configurations import configurations
from offline_grpo.report.history import Series
from offline_grpo.report.sweep_plot import MAX_LABEL, draw_sweep, save_sweep_plot, short_labels
from offline_grpo.report.sweep_run import SweepRun


def runs_of(
    num_configurations: int, num_seeds: int, *, values: tuple[float, ...] = (0.5, 0.75, 0.875)
) -> list[SweepRun]:
    steps = np.arange(len(values), dtype=np.float64)
    return [
        SweepRun(
            name=str(number * num_seeds + seed),
            overrides={"train.lr": str(number), "seed": str(seed)},
            settings={"train.lr": str(number), "seed": str(seed)},
            status="done",
            pass_at_1=Series(steps, np.array(values) * (1 - 0.05 * number - 0.01 * seed)),
            final_low=None,
            final_high=None,
            reward=None,
            minutes=None,
        )
        for number in range(num_configurations)
        for seed in range(num_seeds)
    ]


def test_curves_are_means_and_the_band_is_the_interval(tmp_path: Path) -> None:
    figure = draw_sweep(configurations(runs_of(1, 3, values=(0.5, 1.0))), "day/time")
    curves, ends = figure.axes
    assert curves.lines[0].get_ydata().tolist() == pytest.approx([0.495, 0.99])
    band = curves.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == 1.0, "a share"
    assert band.min() == pytest.approx(0.495 - 4.3027 * 0.005 / 3**0.5)
    assert [text.get_text() for text in ends.get_yticklabels()] == ["lr=0"]


def test_two_seeds_are_drawn_themselves() -> None:
    """Student's t of two would cover the whole picture."""
    curves, _ = draw_sweep(configurations(runs_of(1, 2, values=(0.5, 1.0))), "day/time").axes
    assert not curves.collections
    assert sorted(line.get_ydata()[1] for line in curves.lines) == pytest.approx([0.99, 0.995, 1.0])


def test_equal_curves_do_not_hide_each_other() -> None:
    """Of three that are equal and one that is not, the best are on top and dashed."""
    runs = [
        replace(run, pass_at_1=Series(np.arange(2.0), np.array([0.5, end])))
        for run, end in zip(runs_of(4, 1), (1, 1, 1, 0.9), strict=True)
    ]
    curves, _ = draw_sweep(configurations(runs), "day/time").axes
    assert [line.get_ydata()[-1] for line in curves.lines] == [0.9, 1, 1, 1]
    assert [line.get_linestyle() for line in curves.lines] == ["-", "-", "--", "--"]
    *_, middle, top = (line._unscaled_dash_pattern[1] for line in curves.lines)
    assert (middle, top) == ((4, 4), (4, 8))


@pytest.mark.parametrize(
    ("num_configurations", "num_seeds", "values"), [(1, 1, (0.0,)), (2, 3, (1.0, 1.0)), (12, 5, (0.2, 0.5))]
)
def test_the_picture_is_readable_with_few_and_with_many(
    num_configurations: int, num_seeds: int, values: tuple[float, ...], tmp_path: Path
) -> None:
    found = configurations(runs_of(num_configurations, num_seeds, values=values))
    path = save_sweep_plot(tmp_path, found)
    assert path is not None
    assert matplotlib.image.imread(path).shape[1] > 1000
    figure = draw_sweep(found, "day/time")
    figure.canvas.draw()
    curves, ends = figure.axes
    left, right = (axes.get_tightbbox() for axes in (curves, ends))
    assert left is not None
    assert right is not None
    assert not left.overlaps(right)
    for box in (left, right):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    low, high = curves.get_ylim()
    for line in curves.lines:
        assert low < min(line.get_ydata()) <= max(line.get_ydata()) < high
    rows = [text.get_window_extent() for text in ends.get_yticklabels()]
    assert not [(a, b) for a, b in itertools.pairwise(rows) if a.overlaps(b)]


def test_nothing_is_drawn_of_runs_without_pass_at_1(tmp_path: Path) -> None:
    assert save_sweep_plot(tmp_path, configurations(runs_of(2, 2, values=()))) is None


def test_labels_are_short_and_still_tell_configurations_apart() -> None:
    runs = runs_of(2, 1)
    runs[0].overrides.update({"model.id": "a", "model.tiny.id": "b"})
    runs[1].overrides.update({"model.id": "c" * 100, "model.tiny.id": "d"})
    first, second = short_labels(configurations(runs))
    assert first == "lr=0, model.id=a, model.tiny.id=b"
    assert second.startswith("lr=1, model.id=ccc")
    assert second.endswith("ccc, model.tiny.id=d")
    assert len(second) == MAX_LABEL
