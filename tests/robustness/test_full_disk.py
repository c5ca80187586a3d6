"""A disk that is full, or a folder that cannot be written, at any write of a run: one line, and nothing that was there
is lost.
"""

from __future__ import annotations

import builtins
import fnmatch
import io
import os
import subprocess
import time
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


@pytest.mark.parametrize(
    ("pattern", "after"),
    [
        *(("*/metrics/*", 0), ("*/rollouts/*", 1), ("*starts.yaml", 0), ("*/trainer/state.json", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("*/metrics/*", 3), ("*/samples/*", 1), ("*environment*", 0), ("*/trainer/manifest.json", 1))
        ),
    ],
)
def test_a_file_that_cannot_be_filled_is_one_line_and_costs_nothing(
    pattern, after, cache, whole, tmp_path, capfd
) -> None:
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    with full_for(pattern, after) as opened, pytest.raises(GrpoError, match="No space left on device") as error:
        app.run(compose_config(cache, *SMALL), run)
    assert len(opened) - after - 1 in (
        (0, 1) if "rollouts" in pattern else (0,)
    )  # the evaluation's may be written before it is noticed
    assert "\n" not in str(error.value)
    assert str(run) in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    found = newest_sound(run / "checkpoints")
    assert (found is not None) == (pattern.endswith(".json") or after == 3)
    app.run(compose_config(cache, *SMALL, *((f"resume={run}",) if found is not None else ())), run)
    assert_ended_alike(run, whole)


def test_a_run_whose_messages_cannot_be_kept_goes_on(cache, whole, tmp_path, capfd) -> None:
    run = tmp_path / "run"
    with full_for("*/run.log", 0):
        app.run(compose_config(cache, *SMALL), run)
    assert_ended_alike(run, whole)
    printed = capfd.readouterr().err
    assert printed.count("cannot be written") == 1
    assert (
        "run.log: cannot be written ([Errno 28] No space left on device); messages are lost, the run goes on" in printed
    )
    assert "Traceback" not in printed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs permission to mount a file system")
    yield folder
    deadline = time.monotonic() + 10  # what a process had open is let go a moment after its end
    while subprocess.run(["umount", str(folder)], check=False).returncode != 0:
        assert time.monotonic() < deadline, f"somebody still uses {folder}"
        time.sleep(0.1)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def test_a_file_system_that_is_read_only_is_one_line(disk, cache, whole, tmp_path) -> None:
    run = disk / "run"
    app.run(compose_config(cache, *SMALL, "train.iterations=1", "train.schedule=constant"), run)
    before = weights_of(run)
    remount(disk, "ro")
    for words, folder in (((), disk / "new"), ((), run), ((f"resume={run}",), tmp_path / "fresh")):
        with pytest.raises(GrpoError, match=f"{disk}.* cannot be .*Read-only file system") as error:
            app.run(compose_config(cache, *SMALL, "train.schedule=constant", *words), folder)
        assert "\n" not in str(error.value)
    remount(disk, "rw")
    assert weights_of(run) == before
    assert newest_sound(run / "checkpoints") is not None


@pytest.mark.slow
def test_a_disk_that_fills_up_anywhere_costs_nothing(disk, cache, whole) -> None:
    """With a real file system of 20 sizes, from one that holds nothing to one that holds almost all."""
    needed = sum(path.stat().st_blocks * 512 for path in whole.rglob("*"))
    lines = set()
    for step in range(1, 21):
        run = disk / f"run_{step}"
        remount(disk, f"size={needed * step // 21 + 4096}")
        try:
            app.run(compose_config(cache, *SMALL), run)
        except GrpoError as error:
            lines.add(str(error))
        remount(disk, "size=16m")
        found = newest_sound(run / "checkpoints")
        app.run(compose_config(cache, *SMALL, *((f"resume={run}",) if found is not None else ())), run)
        assert_ended_alike(run, whole)
        subprocess.run(["rm", "-r", str(run)], check=True)
    assert not any("\n" in line for line in lines)
    assert len({line.partition(" could not")[0] for line in lines}) > 3, lines
