"""Reads a run's metrics from its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offline_grpo.logger import completed_iterations
from offline_grpo.types import Metrics

FloatArray = NDArray[np.float64]
FILE_NAME = re.compile(r"(train|eval)_(?:iter_(\d+)|init)\.json")
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

    def last(self, name: str, key: str) -> float | None:
        """The last value of a metric; None where it was not recorded."""
        values = self.series(name, key).values
        return float(values[-1]) if len(values) else None

    def keys(self, name: str) -> set[str]:
        """All metrics of a phase."""
        records = self.evals if name == "eval" else self.train
        return {key for metrics in records.values() for key in metrics}

    def eval_ks(self) -> list[int]:
        """The values of k for which pass@k was measured, ascending."""
        return sorted(int(key[5:]) for key in self.keys("eval") if key.startswith("pass@") and key[5:].isdigit())

    def tasks(self) -> list[str]:
        """The tasks of a mixture, of each of which pass@1 was measured."""
        found = (re.fullmatch(r"task/(.+)/pass@1", key) for key in self.keys("eval"))
        return sorted(match[1] for match in found if match)

    def parts(self, keys: Iterable[str]) -> dict[str, FloatArray]:
        """Training metrics in every iteration, [R] each, 0 where not recorded; without those that are always 0."""
        found = {key: np.array([metrics.get(key, 0.0) for metrics in self.train.values()]) for key in keys}
        return {key: values for key, values in found.items() if values.any()}

    def start_seconds(self) -> dict[str, float]:
        """Seconds before the first iteration, over all starts: part -> seconds, "" for the whole."""
        parts = self.parts(key for key in sorted(self.keys("train")) if START_KEY.fullmatch(key))
        return {re.sub(START_KEY, r"\1", key).replace("_", " "): float(each.sum()) for key, each in parts.items()}

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of the starts, named "start", and of each phase that ever ran, over the whole run."""
        start = self.start_seconds().get("", 0.0)
        phases = self.parts(f"time/{phase}_s" for phase in PHASES)
        found = {"start": start} if start else {}
        return found | {key[len("time/") : -len("_s")]: float(values.sum()) for key, values in phases.items()}

    @property
    def total_s(self) -> float:
        """The run's time: its starts and all phases of its iterations."""
        return sum(self.phase_seconds().values())


def load_history(run_dir: Path) -> History:
    """Read `run_dir/metrics/*.json`. Missing iterations are skipped; a run without metrics gives an empty history."""
    records: dict[str, dict[int, Metrics]] = {"train": {}, "eval": {}}
    for path in (run_dir / "metrics").glob("*.json"):
        if match := FILE_NAME.fullmatch(path.name):
            records[match[1]][int(match[2] or -1)] = json.loads(path.read_bytes())
    return History(run_dir, train=dict(sorted(records["train"].items())), evals=dict(sorted(records["eval"].items())))


def count(number: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def by_number(name: str) -> tuple[int, str]:
    """The sort key of names that end in a number: `iter_999` comes before `iter_1000`."""
    return len(name), name


def duration(seconds: float) -> str:
    """`5.2 s`, `3.4 min` or `2.1 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
