"""Which checkpoints a run folder has, and what their records say. Reads names and JSON alone, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offline_grpo.errors import CheckpointError

FORMAT = 2
"""Of `trainer/state.json`; raised when an older version's checkpoints can no longer be read."""


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`trainer/state.json` of a checkpoint.

    Raises:
        CheckpointError: not there, or not ours.
    """
    path = checkpoint / "trainer" / "state.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"resume={checkpoint}: no readable trainer/state.json, so this is no checkpoint to go on from") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"resume={checkpoint}: written in format {record.get('format')}, this version reads format {FORMAT}")
    return record


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first."""
    return sorted((path for path in folder.glob("iter_*") if path.name[5:].isdigit()), key=lambda path: int(path.name[5:]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = list_checkpoints(folder)
    return found[-1] if found else None
