"""`trainer/manifest.json`: size and SHA-256 of every other file of a checkpoint, so that damage is noticed before it is
trained on.

It protects against disks, copies and people that change a file, not against somebody who changes the manifest too.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from offline_grpo.checkpoint.state import MAX_BYTES, STRICT
from offline_grpo.disk import open_regular, parse_json, read_regular
from offline_grpo.errors import reason_of

TRAINER = "trainer/"
FILE = f"{TRAINER}manifest.json"
NUM_THREADS = 4
"""Files that are hashed at the same time: hashlib lets go of the interpreter, and disks are not faster than a few
cores.
"""


@dataclass(frozen=True)
class _Entry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    __pydantic_config__: ClassVar = STRICT

    files: dict[str, _Entry]


def write_manifest(checkpoint: Path) -> None:
    """Hash all files of a checkpoint that is otherwise complete.

    Raises:
        OSError: one cannot be read, or the manifest not be written.
    """
    names = sorted(_files(checkpoint))
    entries = dict(zip(names, _entries(checkpoint, names), strict=True))
    (checkpoint / FILE).write_text(json.dumps(asdict(_Manifest(entries)), indent=1))


def find_damage(checkpoint: Path, *, of_model: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint, in words; None if all are as they were written.

    Hidden files, which file systems and browsers of files leave behind, do not count.

    Args:
        of_model: look at the model's own files alone, and not at the trainer's; others, such as a chat template,
            may have been added.
    """
    try:
        recorded = parse_json(_Manifest, read_regular(checkpoint / FILE, MAX_BYTES)).files
    except (OSError, ValueError) as error:
        return f"{FILE} cannot be read ({reason_of(error)})"
    found = _files(checkpoint)
    if of_model:
        recorded = {name: entry for name, entry in recorded.items() if not name.startswith(TRAINER)}
        found &= recorded.keys()
    for name in sorted(found ^ recorded.keys()):
        return f"{name} is missing" if name in recorded else f"{name} was added to it"
    names = sorted(recorded, key=lambda name: recorded[name].bytes)
    try:
        for name in names:  # first what needs no reading
            size = (checkpoint / name).stat().st_size
            if size != recorded[name].bytes:
                return f"{name} has {size} bytes and was written with {recorded[name].bytes}"
        for name, entry in zip(names, _entries(checkpoint, names), strict=True):
            if entry != recorded[name]:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror or reason_of(error)})"
    return None


def _files(checkpoint: Path) -> set[str]:
    """Paths of everything but folders, relative to the checkpoint; links are not followed."""
    found = set()
    for folder, folders, files in os.walk(checkpoint):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found |= {
            os.path.relpath(os.path.join(folder, name), checkpoint)
            for name in (*files, *links)
            if not name.startswith(".")
        }
    return found - {FILE}


def _entries(checkpoint: Path, names: Iterable[str]) -> list[_Entry]:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda name: _entry(checkpoint / name), names))


def _entry(path: Path) -> _Entry:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _Entry(file.tell(), digest)
