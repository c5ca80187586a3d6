"""Folders in shared memory that belong to a run, and do not outlive it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from offline_grpo.disk import OwnFolder

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "offline-grpo-"


class Scratch(OwnFolder):
    """A new private folder, in memory where the machine has `/dev/shm`."""

    def __init__(self) -> None:
        super().__init__(SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()), PREFIX)
