"""A run as its folder has it: metrics, settings and results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from offline_grpo.errors import ConfigError
from offline_grpo.logger import completed_iterations
from offline_grpo.redaction import redacted, redacted_text
from offline_grpo.settings import flat
from offline_grpo.types import Metrics

FloatArray = NDArray[np.float64]
FILE_NAME = re.compile(r"(train|eval)_(?:iter_(\d+)|init)\.json")
START_KEY = re.compile(r"time/start(?:_(.+))?_s")
PHASES = ("generate", "train", "sync", "eval", "checkpoint")
"""The phases of an iteration, in order; each has a training metric `time/<phase>_s`."""
SILENT = "train/zero_signal_frac"
"""The share of groups whose rewards are all equal: computed, not recorded."""
WITHOUT_EFFECT = ("resume", "logger", "samples", "num_threads", "cache_dir")
"""Top-level keys that change nothing that is learnt; they do not count when configurations are compared."""
OF_ADDRESS = ("generation.base_url", "generation.api_key")
"""A server that is started again, such as that of a sweep, has another address."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over a run: `values[i]` describes the policy after `steps[i]` training iterations."""

    steps: FloatArray  # [R]
    values: FloatArray  # [R]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Run:
    """Metrics are iteration -> metrics, in order; `evals` may begin at -1, the evaluation before training. What was not
    measured is None, and Hydra's files may be missing.
    """

    folder: Path
    train: Mapping[int, Metrics]
    evals: Mapping[int, Metrics]
    name: str = ""  # its place below the folder of all runs that are looked at

    @property
    def size(self) -> str:
        """`10 training iterations, 6 evaluations`."""
        return f"{count(len(self.train), 'training iteration')}, {count(len(self.evals), 'evaluation')}"

    # Metrics, by `train/KEY` or `eval/KEY`.

    def series(self, metric: str) -> Series:
        """The iterations that recorded it; may be empty."""
        if metric == SILENT:
            silent, groups = self.series("train/num_groups_zero_signal"), self.series("train/num_groups")
            if len(silent) != len(groups):
                return Series(np.empty(0), np.empty(0))
            return Series(silent.steps, silent.values / np.maximum(groups.values, 1))
        phase, key = metric.split("/", 1)
        records = self.evals if phase == "eval" else self.train
        points = [(completed_iterations(phase, i), found[key]) for i, found in records.items() if key in found]
        table = np.array(points, dtype=np.float64).reshape(-1, 2)  # [R, 2]
        return Series(table[:, 0], table[:, 1])

    def bounds(self, metric: str) -> tuple[FloatArray, FloatArray] | None:
        """The recorded 95% interval of a metric at its steps; of the training reward, mean ± standard deviation."""
        values = self.series(metric).values
        if metric == "train/reward_mean":
            std = self.series("train/reward_std").values
            return (values - std, values + std) if len(std) == len(values) else None
        low, high = (self.series(f"{metric}_{end}").values for end in ("low", "high"))
        return (low, high) if len(low) == len(high) == len(values) else None

    def last(self, metric: str) -> float | None:
        values = self.series(metric).values
        return float(values[-1]) if len(values) else None

    def keys(self, phase: str) -> set[str]:
        """All metrics of "train" or "eval"."""
        return {key for metrics in (self.evals if phase == "eval" else self.train).values() for key in metrics}

    def eval_ks(self) -> list[int]:
        """The values of k for which pass@k was measured, ascending."""
        return sorted(int(key[5:]) for key in self.keys("eval") if key.startswith("pass@") and key[5:].isdigit())

    def tasks(self) -> list[str]:
        """The tasks of a mixture, of each of which pass@1 was measured."""
        found = (re.fullmatch(r"task/(.+)/pass@1", key) for key in self.keys("eval"))
        return sorted(match[1] for match in found if match)

    # Time.

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

    # Results.

    @property
    def pass_at_1(self) -> float | None:
        """Of the last evaluation."""
        return self.last("eval/pass@1")

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% of that, over problems."""
        low, high = (self.last(f"eval/pass@1_{end}") for end in ("low", "high"))
        return None if low is None or high is None else (low, high)

    @property
    def best_pass_at_1(self) -> float | None:
        return max(self.series("eval/pass@1").values.tolist(), default=None)

    @property
    def reward(self) -> float | None:
        """Mean of the last iteration."""
        return self.last("train/reward_mean")

    @property
    def minutes(self) -> float | None:
        return self.total_s / 60 if self.train else None

    @cached_property
    def status(self) -> str:
        """`done`, `stopped at 3/10`, or `no metrics` of a run that never finished an iteration."""
        num_done = max(self.train, default=-1) + 1
        if not num_done:
            return "no metrics"
        # It is done after its last iteration, or where it stopped early, or if nobody knows how many it was to have.
        last = self.train.get(num_done - 1, {}).keys() | self.evals.get(num_done - 1, {}).keys()
        wanted = 0 if "stopped_early" in last or not self.config else int(self.config["train"]["iterations"])
        return "done" if num_done >= wanted else f"stopped at {num_done}/{wanted}"

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    # Hydra's files: what the run was composed of.

    def _hydra(self, name: str) -> Any:
        path = self.folder / ".hydra" / name
        return (read_yaml(path) if path.is_file() else None) or {}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """As it was composed, interpolations as they are."""
        return self._hydra("config.yaml")

    @cached_property
    def choices(self) -> dict[str, str]:
        """Group -> option, without Hydra's own."""
        choices = self._hydra("hydra.yaml").get("hydra", {"runtime": {"choices": {}}})["runtime"]["choices"]
        return {str(group): str(option) for group, option in choices.items() if not str(group).startswith("hydra/")}

    @cached_property
    def settings(self) -> dict[str, str]:
        """The configuration by dotted keys, with what was changed on the way; without keys that are null."""
        stored = flat(redacted(self.config)) if self.config else {}
        return {key: str(value) for key, value in stored.items() if value is not None} | self._changes

    @cached_property
    def overrides(self) -> dict[str, str]:
        """`["train.lr=1e-6", "task=sat"]` -> {"train.lr": "1e-6", "task": "sat"}, with what was changed on the way,
        without the server's address; `~key` deletes and has no value.
        """
        pairs = (redacted_text(str(word)).partition("=") for word in self._hydra("overrides.yaml"))
        found = {key: value for key, _, value in pairs} | self._changes
        return {key: value for key, value in found.items() if key not in {"resume", *OF_ADDRESS}}

    @cached_property
    def _changes(self) -> dict[str, str]:
        """Dotted key -> `0.001, then 0.0001`, of what a resume changed; not of keys that follow others."""
        stored, found = flat(self.config), dict[str, str]()
        for start in starts_of(self.folder):
            for key, (old, new) in start.get("changes", {}).items():
                found[key] = f"{found.get(key, old)}, then {new}"
        return {key: change for key, change in found.items() if "${" not in str(stored.get(key))}

    @property
    def about(self) -> str:
        """`arithmetic, tiny, grpo, lr 0.0003`: task, model, rollouts, loss and rate; empty without Hydra's files."""
        if not (choices := self.choices):
            return ""
        model, source = self.config["model"], choices.get("rollouts", "on_policy")
        adapted = [f"LoRA rank {model['lora']['r']}"] if model.get("lora") else []
        sampled = [] if source == "on_policy" else [f"rollouts {source}"]
        name = Path(str(model["train_id"])).name if model.get("train_id") else choices["model"]
        rate = f"lr {float(self.config['train']['lr']):g}"
        return ",  ".join([choices["task"], name, *adapted, *sampled, choices["train/loss"], rate])


def load_run(folder: Path, name: str = "") -> Run:
    """Read a folder. Missing iterations are skipped; a run without metrics has none."""
    records: dict[str, dict[int, Metrics]] = {"train": {}, "eval": {}}
    for path in (folder / "metrics").glob("*.json"):
        if match := FILE_NAME.fullmatch(path.name):
            records[match[1]][int(match[2] or -1)] = json.loads(path.read_bytes())
    return Run(folder, dict(sorted(records["train"].items())), dict(sorted(records["eval"].items())), name)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs, and the runs of sweeps, named by their place below a folder of all. Raises ConfigError for other paths."""
    found: list[Path] = []
    for path in paths:
        inside = [file.parent.parent for file in path.rglob(".hydra/overrides.yaml")]
        of_path = [path] if (path / "metrics").is_dir() else sorted(inside, key=lambda folder: by_number(str(folder)))
        if not of_path:
            raise ConfigError(f"{path}: is neither a run (a folder with metrics/) nor a sweep (a folder of runs)")
        found += of_path
    # Each once, by its place below a folder of all.
    folders = list(dict.fromkeys(folder.resolve() for folder in found))
    base = os.path.commonpath([folder.parent for folder in folders])
    return [load_run(folder, os.path.relpath(folder, base)) for folder in folders]


def read_yaml(path: Path) -> Any:
    """The content of a YAML file."""
    return yaml.safe_load(path.read_text())


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """What `history/resume.py` records of each start of a run, in order."""
    path = folder / ".hydra" / "starts.yaml"
    return (read_yaml(path) if path.is_file() else None) or []


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
