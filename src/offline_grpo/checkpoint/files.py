"""Finds the checkpoints of a run folder, and those of them that can be trusted. Loads no weights and imports no torch."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from offline_grpo.checkpoint import manifest
from offline_grpo.checkpoint.manifest import find_damage
from offline_grpo.checkpoint.state import TrainerState, read_state
from offline_grpo.errors import CheckpointError

BEST = "best"
"""The link to the best checkpoint in a run's `checkpoints` folder, with `checkpoint.keep_best`."""

log = logging.getLogger(__name__)


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, oldest first."""
    return sorted(
        (path for path in folder.glob("iter_*") if path.name[5:].isdecimal()), key=lambda path: int(path.name[5:])
    )


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def set_link(link: Path, target: str) -> None:
    """A relative link, in place of the one that may be there."""
    new = link.with_name(f".{link.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def latest_state(folder: Path) -> TrainerState | None:
    """What the newest checkpoint says whose `state.json` can be read; its other files are not looked at. None if there
    is none.
    """
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return read_state(checkpoint)
        except CheckpointError:
            continue
    return None


def verified_state(checkpoint: Path, *, key: str = "resume") -> TrainerState:
    """`read_state`, of a checkpoint whose files are all as they were written. Reads every file once.

    Raises:
        CheckpointError: as `read_state`, or a file is damaged; names the newest sound checkpoint beside it.
    """
    try:
        return _verified(checkpoint, key)
    except CheckpointError as error:
        sound = next(
            (path for path, found in _newest_first(checkpoint.parent) if isinstance(found, TrainerState)), None
        )
        raise CheckpointError(
            f"{error}; the newest sound one is {sound}" if sound is not None else str(error)
        ) from error


def check_model_folder(name: str, key: str) -> None:
    """Look at the model's files in a checkpoint that a run shall start from as from any model. Others may have been
    added.

    Args:
        name: of any model; nothing is checked of what no run wrote.
        key: the setting, for the message.

    Raises:
        CheckpointError: a file is missing, or not as it was written.
    """
    checkpoint = Path(name).expanduser()
    damage = find_damage(checkpoint, of_model=True) if (checkpoint / manifest.FILE).exists() else None
    if damage is not None:
        raise CheckpointError(
            f"{key}={name}: is damaged: {damage}; take another checkpoint, or delete {manifest.FILE} if that is meant"
        )


def newest_sound(folder: Path) -> tuple[Path, TrainerState] | None:
    """The newest checkpoint in a run's `checkpoints` folder whose files are all as they were written; None if there is
    no checkpoint.

    Reads the files of each, from the newest on, until one is sound. A warning names the damaged ones.

    Raises:
        CheckpointError: none of them is sound.
    """
    damaged: list[CheckpointError] = []
    for checkpoint, found in _newest_first(folder):
        if isinstance(found, TrainerState):
            for error in damaged:
                log.warning("%s; using %s instead", error, checkpoint)
            return checkpoint, found
        damaged.append(found)
    if damaged:
        raise CheckpointError(f"{damaged[0]}; no checkpoint in {folder} is sound")
    return None


def _newest_first(folder: Path) -> Iterator[tuple[Path, TrainerState | CheckpointError]]:
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            yield checkpoint, _verified(checkpoint, "resume")
        except CheckpointError as error:
            yield checkpoint, error


def _verified(checkpoint: Path, key: str) -> TrainerState:
    state = read_state(checkpoint, key=key)
    damage = find_damage(checkpoint)
    if damage is not None:
        raise CheckpointError(f"{key}={checkpoint}: is damaged: {damage}")
    return state


def make_empty(hidden: Path) -> None:
    """The hidden folder of a new checkpoint."""
    shutil.rmtree(hidden, ignore_errors=True)
    (hidden / "trainer").mkdir(parents=True)


def sync_file(path: Path) -> None:
    """On disk, whatever the system still holds in memory; folders are left out."""
    if path.is_dir():
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in it, on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
