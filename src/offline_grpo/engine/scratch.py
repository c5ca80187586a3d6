"""Folders in shared memory that belong to a run, and do not outlive it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "offline-grpo-"


class Scratch:
    """A new private folder, in memory where the machine has `/dev/shm`.

    This process holds a lock on it for as long as it lives, whatever ends it, so that the next run on the machine can tell what was left
    behind from what is used. A process id could not: containers that share the memory have ids of their own.
    """

    def __init__(self) -> None:
        remove_left_behind()
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():  # another run may have taken it for left behind before it was locked
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Delete the folder. Called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_behind() -> None:
    """Delete the folders of runs that have ended."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or in use
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
