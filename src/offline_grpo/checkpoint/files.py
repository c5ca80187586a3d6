"""Finds the checkpoints of a run folder, and those of them that are as they were written. Loads no weights and imports
no torch.

`trainer/manifest.json` has size and SHA-256 of every other file of a checkpoint, so that damage by disks and copies is
noticed before it is trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offline_grpo.checkpoint.state import TrainerState, read_state
from offline_grpo.errors import CheckpointError, reason_of

BEST = "best"
"""The link to the best checkpoint in a run's `checkpoints` folder, with `checkpoint.keep_best`."""
MANIFEST = "trainer/manifest.json"
NUM_THREADS = 4
"""Files that are hashed at the same time: hashlib releases the interpreter's lock, and disks are not faster than a few
cores.
"""

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
    """`state.json` of the newest checkpoint in which it can be read, without a look at the other files; None if there
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
        CheckpointError: as `read_state`, or a file is damaged.
    """
    state = read_state(checkpoint, key=key)
    damage = find_damage(checkpoint)
    if damage is not None:
        raise CheckpointError(f"{key}={checkpoint}: is damaged: {damage}")
    return state


def check_model_folder(name: str, key: str) -> None:
    """See that the model's files in a checkpoint that a new run starts from are as they were written.

    Args:
        name: of any model; nothing is checked of what no run wrote.
        key: the setting, for the message.

    Raises:
        CheckpointError: a file is missing, or has changed.
    """
    checkpoint = Path(name).expanduser()
    damage = find_damage(checkpoint, of_model=True) if (checkpoint / MANIFEST).exists() else None
    if damage is not None:
        raise CheckpointError(
            f"{key}={name}: is damaged: {damage}; take another checkpoint, or delete {MANIFEST} if that is meant"
        )


def newest_sound(folder: Path) -> tuple[Path, TrainerState]:
    """The newest checkpoint in a run's `checkpoints` folder whose files are all as they were written. A warning names
    each damaged one.

    Raises:
        CheckpointError: none of them is sound.
    """
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return checkpoint, verified_state(checkpoint)
        except CheckpointError as error:
            log.warning("%s; looking for an older one", error)
    raise CheckpointError(f"resume: no checkpoint in {folder} is sound")


def write_manifest(checkpoint: Path) -> None:
    """Hash all files of a checkpoint that is otherwise complete."""
    names = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    names = [name for name in names if name != MANIFEST]
    sizes = [(checkpoint / name).stat().st_size for name in names]
    entries = zip(names, sizes, _hashes(checkpoint, names), strict=True)
    record = {"files": {name: {"bytes": size, "sha256": digest} for name, size, digest in entries}}
    (checkpoint / MANIFEST).write_text(json.dumps(record, indent=1))


def find_damage(checkpoint: Path, *, of_model: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if all are as they were written.

    Args:
        of_model: look at the model's own files alone, and not at the trainer's.
    """
    try:
        recorded = json.loads((checkpoint / MANIFEST).read_text())["files"]
        names = [name for name in recorded if not (of_model and name.startswith("trainer/"))]
        for name in names:  # first what needs no reading
            size, written = (checkpoint / name).stat().st_size, recorded[name]["bytes"]
            if size != written:
                return f"{name} has {size} bytes and was written with {written}"
        for name, digest in zip(names, _hashes(checkpoint, names), strict=True):
            if digest != recorded[name]["sha256"]:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{MANIFEST} cannot be read ({reason_of(error)})"
    return None


def _hashes(checkpoint: Path, names: Iterable[str]) -> Iterator[str]:
    def sha256(name: str) -> str:
        with (checkpoint / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return iter(list(pool.map(sha256, names)))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
