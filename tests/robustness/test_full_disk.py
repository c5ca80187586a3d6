"""A disk that is full: the last checkpoint is whole, and the run resumes from it to the same end."""

from __future__ import annotations

import builtins
import fnmatch
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from children import draw_nothing, metrics_of, weights_of
from factories import compose_config

from offline_grpo.checkpoint.files import newest_sound
from offline_grpo.errors import GrpoError
from offline_grpo.report import plots
from offline_grpo.run import app

SMALL = (
    *(
        "num_threads=1",
        "train.iterations=3",
        "data.problems_per_iteration=2",
        "data.rollouts_per_problem=2",
        "data.num_train_seeds=20",
    ),
    *(
        "eval.num_ids=2",
        "eval.replicates=1",
        "eval.ks=[1]",
        "eval.bootstrap_samples=5",
        "eval.interval=1",
        "checkpoint.save_interval=1",
    ),
    *(
        "model.tiny.warm_start_steps=5",
        "model.tiny.hidden_size=32",
        "task.format_weight=0.5",
        "generation.max_new_tokens=4",
    ),
    *("train.drop_zero_signal_groups=false", "checkpoint.keep_last_k=all"),
)


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save_report", draw_nothing)


@pytest.fixture(scope="module")
def whole(cache: str, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_report", draw_nothing)
        app.run(compose_config(cache, *SMALL), folder)
    return folder


@contextmanager
def full_for(pattern: str, after: int) -> Iterator[list[str]]:
    """Files whose paths match cannot be filled: opened for writing, they are `/dev/full`. The first `after` of them are
    spared.
    """
    opened: list[str] = []

    def open_full(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and set("wax+") & set(mode) and fnmatch.fnmatch(str(file), pattern):
            opened.append(str(file))
            if len(opened) > after:
                file, mode = "/dev/full", mode.replace("x", "w")
        return real(file, mode, *args, **kwargs)

    real = io.open
    with pytest.MonkeyPatch.context() as patch:
        for module in (io, builtins):
            patch.setattr(module, "open", open_full)
        yield opened


def assert_ended_alike(run: Path, whole: Path) -> None:
    assert weights_of(run) == weights_of(whole)
    assert metrics_of(run) == metrics_of(whole)


@pytest.mark.parametrize("pattern", ["*/trainer/state.json", "*/metrics/*"])
def test_a_file_that_cannot_be_filled_costs_nothing(pattern, cache, whole, tmp_path) -> None:
    run, spared = tmp_path / "run", 1 if "trainer" in pattern else 3
    with full_for(pattern, spared), pytest.raises(GrpoError, match="No space left on device") as error:
        app.run(compose_config(cache, *SMALL), run)
    assert str(run) in str(error.value)
    assert newest_sound(run / "checkpoints") is not None
    app.run(compose_config(cache, *SMALL, f"resume={run}"), run)
    assert_ended_alike(run, whole)
