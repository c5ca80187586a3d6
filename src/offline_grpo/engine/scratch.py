"""Folders in shared memory that belong to a run, and do not outlive it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from offline_grpo import disk

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "offline-grpo-"


class Scratch(disk.OwnFolder):
    """A new private folder, in memory where the machine has `/dev/shm`. Those of runs that have ended are deleted."""

    def __init__(self) -> None:
        remove_left_behind()
        super().__init__(SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()), f"{PREFIX}{os.getpid()}-")


def remove_left_behind() -> None:
    """Delete the folders of runs that have ended."""
    disk.remove_left_behind(SHARED_MEMORY, PREFIX)
