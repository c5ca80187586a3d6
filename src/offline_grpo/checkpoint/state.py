"""`trainer/state.json`: what a checkpoint says about its run. Read strictly, because a wrong number here would train
another model.

The types are the schema: no key may be missing, unknown or of another type, and `__post_init__` has the ranges. Imports
no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from offline_grpo.disk import parse_json, read_regular
from offline_grpo.errors import CheckpointError, ConfigError, reason_of
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.counters import PushCounters, UpdateCounters
from offline_grpo.train.milestones import Watch
from offline_grpo.train.schedule import LrSchedule

FORMAT = 4
"""Format version of checkpoints; increased when those of an older version can no longer be read."""
FILE = "trainer/state.json"
MAX_BYTES = 256 * 2**20
"""Of a checkpoint's JSON files; the state of a source of rollouts may hold a queue."""
MAX_COUNT = 2**53
"""Counters above it would not be exact in the floats that are computed from them."""
STRICT: Mapping[str, Any] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class TrainerState:
    """The content of the file.

    Args:
        owes_evaluation: the evaluation after the iteration was interrupted.
        source: what `Source.state_dict` returned.
        config: the resolved configuration of the run.
    """

    __pydantic_config__: ClassVar = STRICT

    iteration: int
    owes_evaluation: bool
    counters: UpdateCounters
    lr_schedule: LrSchedule
    schedule: PushCounters
    source: dict[str, Any]
    milestones: dict[str, Watch]
    config: dict[str, Any]
    format: int = FORMAT

    def __post_init__(self) -> None:
        updates, pushes, lr = self.counters, self.schedule, self.lr_schedule
        is_right = {
            "iteration": 0 <= self.iteration <= MAX_COUNT,
            "counters": 0 <= updates.num_refused_in_a_row <= updates.num_refused <= updates.num_updates <= MAX_COUNT,
            "schedule": 0 <= pushes.version <= updates.version and 0 <= pushes.num_skipped <= MAX_COUNT,
            "lr_schedule.kind": lr.kind in ("constant", "linear", "cosine"),
            "lr_schedule": 0 <= lr.first <= updates.num_updates and 0 <= lr.scale <= 1,
            "lr_schedule.num_updates": 0
            <= min(lr.num_updates, lr.warmup_steps)
            <= max(lr.num_updates, lr.warmup_steps)
            <= MAX_COUNT,
        }
        is_right["milestones"] = self.milestones.keys() <= {"keep_best", "stop_when"}
        for name, watch in self.milestones.items():
            is_seen = watch.best_iteration is not None and watch.best is not None
            is_right[f"milestones.{name}"] = (
                -1 <= watch.best_iteration <= self.iteration and 0 <= watch.num_since_best <= MAX_COUNT  # type: ignore[operator]
                if is_seen
                else (watch.best_iteration, watch.best, watch.last, watch.num_since_best) == (None, None, None, 0)
            )
        for name, is_possible in is_right.items():
            if not is_possible:
                raise ValueError(f"{name} has values that no run writes")

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)


def read_state(checkpoint: Path, *, key: str = "resume") -> TrainerState:
    """`trainer/state.json` of a checkpoint.

    Args:
        key: what named the checkpoint, for messages.

    Raises:
        CheckpointError: the file is missing, not from this pipeline, or says what no run would.
    """
    try:
        content = read_regular(checkpoint / FILE, MAX_BYTES)
    except OSError as error:
        reason = error.strerror or reason_of(error)
        raise CheckpointError(
            f"{key}={checkpoint}: no readable {FILE} ({reason}), so this is not a checkpoint of a run"
        ) from error
    try:
        found = parse_json(dict[str, Any], content)
        if found.get("format") != FORMAT:
            other = str(found.get("format"))[:20]
            raise CheckpointError(f"{key}={checkpoint}: written in format {other}, this version reads format {FORMAT}")
        state = parse_json(TrainerState, content)
        parse_json(_Read, content)
        if asdict(state) != found:  # a key that has a default is there all the same
            raise ValueError("keys are missing")
        number = re.fullmatch(r"iter_(\d+)", checkpoint.name)
        if number is not None and int(number[1]) != state.iteration:
            raise ValueError(f"iteration={state.iteration}: does not fit the name of the folder")
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"{key}={checkpoint}: its {FILE} is damaged ({reason_of(error)})") from error
    return state


@dataclass
class _Target:
    _target_: str


@dataclass
class _Data:
    problems_per_iteration: int
    rollouts_per_problem: int


@dataclass
class _Eval:
    temperature: float


@dataclass
class _Generation:
    max_new_tokens: int


@dataclass
class _StopWhen(StopWhenConfig):
    __pydantic_config__: ClassVar = STRICT


@dataclass
class _Train:
    iterations: int
    precision: Literal["fp32", "bf16", "fp16"]
    stop_when: _StopWhen


@dataclass
class _Config:
    task: _Target
    data: _Data
    eval: _Eval
    generation: _Generation
    model: dict[str, Any]
    train: _Train


@dataclass
class _Read:
    """What is read of the configuration in a checkpoint. The rest is compared, or shown."""

    __pydantic_config__: ClassVar = STRICT | {"extra": "ignore"}  # type: ignore[operator]

    config: _Config
