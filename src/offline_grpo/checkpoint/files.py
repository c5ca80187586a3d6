"""A run's checkpoints as files: which there are, what their `trainer/state.json` says, and whether they are as they
were written. Loads no weights and imports no torch.

`trainer/manifest.json` has size and SHA-256 of every other file of a checkpoint, so that damage by disks and copies is
noticed before it is trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_grpo.errors import CheckpointError, reason_of
from offline_grpo.train.schedule import LrSchedule, UpdateCounters, Watch

BEST = "best"
"""The link to the best checkpoint in a run's `checkpoints` folder, with `checkpoint.keep_best`."""
FORMAT = 5
"""Format version of checkpoints; increased when those of an older version can no longer be read."""
STATE, MANIFEST = "trainer/state.json", "trainer/manifest.json"
NUM_THREADS = 4  # hashlib releases the interpreter's lock, and disks are not faster than a few cores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """The content of `trainer/state.json`."""

    iteration: int
    counters: UpdateCounters
    lr_schedule: LrSchedule
    source: dict[str, Any]  # what `Source.state_dict` returned
    milestones: dict[str, Watch]
    config: dict[str, Any]  # the resolved configuration of the run
    format: int = FORMAT


def read_state(checkpoint: Path, *, key: str = "resume") -> TrainerState:
    """`trainer/state.json` of a checkpoint, which the setting `key` names. Raises CheckpointError if it is missing,
    damaged, or of another format.
    """
    try:
        record = json.loads((checkpoint / STATE).read_text())
        if (found := record["format"]) != FORMAT:
            raise CheckpointError(f"{key}={checkpoint}: written in format {found}, this version reads format {FORMAT}")
        record["counters"] = UpdateCounters(**record["counters"])
        record["lr_schedule"] = LrSchedule(**record["lr_schedule"])
        record["milestones"] = {name: Watch(**watch) for name, watch in record["milestones"].items()}
        return TrainerState(**record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{key}={checkpoint}: is damaged: no readable {STATE} ({reason_of(error)})") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first."""
    found = (path for path in folder.glob("iter_*") if path.name[5:].isdecimal())
    return sorted(found, key=lambda path: int(path.name[5:]))


def latest_checkpoint(folder: Path) -> Path | None:
    return next(reversed(list_checkpoints(folder)), None)


def latest_state(folder: Path) -> TrainerState | None:
    """`state.json` of the newest checkpoint in which it can be read; None if there is none."""
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return read_state(checkpoint)
        except CheckpointError:
            continue
    return None


def verified_state(checkpoint: Path, *, key: str = "resume") -> TrainerState:
    """`read_state`, of a checkpoint whose files are all as they were written: reads them. Raises CheckpointError."""
    state = read_state(checkpoint, key=key)
    _check_files(checkpoint, key)
    return state


def check_model_folder(name: str, key: str) -> None:
    """Raise CheckpointError, about the setting `key`, for the model of a checkpoint whose files are not as they were
    written. Nothing is checked of other models.
    """
    checkpoint = Path(name).expanduser()
    if (checkpoint / MANIFEST).exists():
        _check_files(checkpoint, key, but_for="trainer/")


def newest_sound(folder: Path) -> tuple[Path, TrainerState]:
    """The newest checkpoint in a run's `checkpoints` folder that is as it was written. Warns of damaged ones."""
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return checkpoint, verified_state(checkpoint)
        except CheckpointError as error:
            log.warning("%s; looking for an older one", error)
    raise CheckpointError(f"resume: no checkpoint in {folder} is sound")


def write_manifest(checkpoint: Path) -> None:
    """Hash all files of a checkpoint that is otherwise complete."""
    names = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = zip(names, pool.map(_sha256, (checkpoint / name for name in names)), strict=True)
    files = {name: {"bytes": (checkpoint / name).stat().st_size, "sha256": digest} for name, digest in digests}
    (checkpoint / MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def _check_files(checkpoint: Path, key: str, *, but_for: str | None = None) -> None:
    """Raise CheckpointError unless all files, but for those in a folder, are as they were written."""
    try:
        recorded = json.loads((checkpoint / MANIFEST).read_text())["files"]
        names = [name for name in recorded if but_for is None or not name.startswith(but_for)]
        changed = [name for name in names if (checkpoint / name).stat().st_size != recorded[name]["bytes"]]
        if not changed:  # else that needs no reading
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                digests = zip(names, pool.map(_sha256, (checkpoint / name for name in names)), strict=True)
            changed = [name for name, digest in digests if digest != recorded[name]["sha256"]]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{key}={checkpoint}: is damaged: {reason_of(error)}") from error
    if changed:
        raise CheckpointError(f"{key}={checkpoint}: is damaged: {changed[0]} has changed since it was written")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
