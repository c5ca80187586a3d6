"""Finds the checkpoints of a run folder and reads their `state.json`. Loads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offline_grpo.errors import CheckpointError

FORMAT = 3
"""Format version of `trainer/state.json`; increased when checkpoints of an older version can no longer be read."""
BEST = "best"
"""The link to the best checkpoint in a run's `checkpoints` folder, with `checkpoint.keep_best`."""


def read_state(checkpoint: Path, *, key: str = "resume") -> dict[str, Any]:
    """`trainer/state.json` of a checkpoint.

    Args:
        key: what named the checkpoint, for messages.

    Raises:
        CheckpointError: the file is missing, or not from this pipeline.
    """
    path = checkpoint / "trainer" / "state.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{key}={checkpoint}: no readable trainer/state.json, so this is not a checkpoint of a run") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{key}={checkpoint}: written in format {record.get('format')}, this version reads format {FORMAT}")
    return record


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first."""
    return sorted((path for path in folder.glob("iter_*") if path.name[5:].isdigit()), key=lambda path: int(path.name[5:]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = list_checkpoints(folder)
    return found[-1] if found else None
