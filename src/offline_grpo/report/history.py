"""Reads a run's metrics from its folder."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offline_grpo.errors import GrpoError
from offline_grpo.logger import completed_iterations
from offline_grpo.types import Metrics

FloatArray = NDArray[np.float64]
FILE_NAME = re.compile(r"(?P<name>train|eval)_(?:iter_(?P<iteration>\d+)|init)\.json")
START_KEY = re.compile(r"time/start(?:_(.+))?_s")
PHASES = ("generate", "train", "sync", "eval", "checkpoint")
"""The phases of an iteration, in order; each has a training metric `time/<phase>_s`."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over a run: `values[i]` describes the policy after `steps[i]` training iterations."""

    steps: FloatArray  # [R]
    values: FloatArray  # [R]

    def __len__(self) -> int:
        return len(self.values)

    def best(self) -> int | None:
        """The index of the first highest value that is finite; None without one."""
        ranked = np.where(np.isfinite(self.values), self.values, -np.inf)
        index = int(ranked.argmax()) if len(ranked) else 0
        return index if len(ranked) and np.isfinite(ranked[index]) else None


@dataclass(frozen=True, slots=True)
class History:
    """All metrics of a run: iteration -> metrics, in order. `evals` may begin at -1, the evaluation before training."""

    run_dir: Path
    train: Mapping[int, Metrics]
    evals: Mapping[int, Metrics]

    @property
    def size(self) -> str:
        """`10 training iterations, 6 evaluations`."""
        return f"{count(len(self.train), 'training iteration')}, {count(len(self.evals), 'evaluation')}"

    def series(self, name: str, key: str) -> Series:
        """Metric `key` of phase `name` ("train" or "eval") at the iterations that recorded it; may be empty."""
        records = self.evals if name == "eval" else self.train
        points = [(completed_iterations(name, i), metrics[key]) for i, metrics in records.items() if key in metrics]
        table = np.array(points, dtype=np.float64).reshape(-1, 2)  # [R, 2]
        return Series(table[:, 0], table[:, 1])

    def eval_ks(self) -> list[int]:
        """The values of k for which pass@k was measured, ascending."""
        keys = {key for metrics in self.evals.values() for key in metrics}
        return sorted(int(key[5:]) for key in keys if key.startswith("pass@") and key[5:].isdigit())

    def held_out_tasks(self) -> list[str]:
        """The tasks of a mixture, of each of which pass@1 was measured."""
        keys = {key for metrics in self.evals.values() for key in metrics}
        return sorted(
            key[len("task/") : -len("/pass@1")] for key in keys if key.startswith("task/") and key.endswith("/pass@1")
        )

    def phase_seconds(self) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Completed iterations [R], and the seconds per iteration [R] of each phase that ever ran; 0 where it did not
        run.
        """
        steps = np.array(list(self.train), dtype=np.float64)
        seconds = {
            phase: np.array([metrics.get(f"time/{phase}_s", 0.0) for metrics in self.train.values()], dtype=np.float64)
            for phase in PHASES
        }
        return steps, {phase: values for phase, values in seconds.items() if values.any()}

    def start_seconds(self) -> dict[str, float]:
        """Seconds before the first iteration, summed over all starts of the run: name of the part -> seconds, "" for
        the whole.
        """
        found: dict[str, float] = {}
        for metrics in self.train.values():
            for key in metrics:
                if match := START_KEY.fullmatch(key):
                    name = (match[1] or "").replace("_", " ")
                    found[name] = found.get(name, 0.0) + metrics[key]
        return found


def load_history(run_dir: Path, damaged: list[str] | None = None) -> History:
    """Read `run_dir/metrics/*.json`. Missing iterations are skipped; a run without metrics gives an empty history.

    Args:
        damaged: takes what is wrong with files that cannot be read, which are skipped too.

    Raises:
        GrpoError: a file is not a JSON object of numbers, and `damaged` is None.
    """
    records: dict[str, dict[int, Metrics]] = {"train": {}, "eval": {}}
    for path in (run_dir / "metrics").glob("*.json"):
        match = FILE_NAME.fullmatch(path.name)
        if match is not None:
            iteration = -1 if match["iteration"] is None else int(match["iteration"])
            try:
                records[match["name"]][iteration] = _read(path)
            except GrpoError as error:
                if damaged is None:
                    raise
                damaged.append(str(error))
    return History(run_dir, train=_measured(records["train"]), evals=_measured(records["eval"]))


def by_number(name: str) -> tuple[int, str]:
    """The sort key of names that end in a number: `iter_999` comes before `iter_1000`."""
    return len(name), name


def count(number: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _measured(records: Mapping[int, Metrics]) -> dict[int, Metrics]:
    """In order, without metrics that are finite nowhere, of which there is nothing to draw."""
    known = {key for metrics in records.values() for key, value in metrics.items() if math.isfinite(value)}
    return {i: {key: value for key, value in metrics.items() if key in known} for i, metrics in sorted(records.items())}


def _read(path: Path) -> Metrics:
    """NaN and infinity pass: the JSON of others has them where a run has diverged."""
    try:
        metrics = json.loads(path.read_bytes())
    except OSError as error:
        raise GrpoError(
            f"{path}: cannot be read ({error.strerror}); fix its permissions, delete it, or restore the run folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"{path}: is not JSON ({error}); delete it, or restore the run folder") from error
    if not isinstance(metrics, dict):
        raise GrpoError(
            f"{path}: holds a {type(metrics).__name__}, not an object of metrics; delete it, or restore the run folder"
        )
    for key, value in metrics.items():
        if not isinstance(value, (int, float)):
            shown = "null" if value is None else f"{value!r:.40}"
            raise GrpoError(f"{path}: {key}={shown} is no number; delete the file, or restore the run folder")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise GrpoError(
                f"{path}: {key}={value!r:.40} is too large a number; delete the file, or restore the run folder"
            )
    return metrics
