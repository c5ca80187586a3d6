"""Checkpoint folders as the checkpointer writes them, without a run and without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offline_grpo.checkpoint.files import STATE, TrainerState, write_manifest
from offline_grpo.train.schedule import LrSchedule, UpdateCounters


def config_of(**train: Any) -> dict[str, Any]:
    """What is read of the configuration in a checkpoint, with these settings of `train`."""
    stop_when = {"metric": "pass@1", "threshold": None, "patience": None}
    return {
        "task": {"_target_": "offline_grpo.task.arithmetic.Arithmetic"},
        "data": {"problems_per_iteration": 2, "rollouts_per_problem": 2},
        "eval": {"temperature": 1.0, "enabled": True, "interval": 10},
        "generation": {"max_new_tokens": 8},
        "model": {"train_id": None},
        "train": {"iterations": 10, "precision": "fp32", "stop_when": stop_when, **train},
    }


def state_of(iteration: int = 0, **changes: Any) -> TrainerState:
    """After `iteration`, with one update in each."""
    num_updates = iteration + 1
    values: dict[str, Any] = {
        "iteration": iteration,
        "counters": UpdateCounters(num_updates),
        "lr_schedule": LrSchedule(kind="constant", num_updates=100, warmup_steps=0),
        "source": {},
        "milestones": {},
        "config": config_of(),
    }
    return TrainerState(**(values | changes))


def make_checkpoint(folder: Path, state: TrainerState | None = None) -> Path:
    """Add the trainer state and the manifest to a folder; returns it."""
    (folder / "trainer").mkdir(parents=True, exist_ok=True)
    (folder / STATE).write_text((state or state_of()).to_json())
    write_manifest(folder)
    return folder
