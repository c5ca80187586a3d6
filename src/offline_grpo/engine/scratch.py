"""Folders in shared memory that belong to a run, and do not outlive it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from offline_grpo.disk import OwnFolder, user_cache

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "offline-grpo-"
LONGEST_SOCKET_FOLDER = 107 - len("/") - 36
"""Bytes of a folder in which a socket may have a UUID for its name: the kernel allows 107 for the whole path."""
COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
"""Where a server keeps what it compiles: variable, and folder in the user's cache."""
OF_THE_SHELL = {name: os.environ[name] for name in COMPILED if name in os.environ}
"""As they were when the run began: torch sets the second one in a process that compiles, and servers that start later
would inherit it.
"""


class Scratch(OwnFolder):
    """A new private folder, in memory where the machine has `/dev/shm`."""

    def __init__(self) -> None:
        super().__init__(SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()), PREFIX)


def temporary_folder(scratch: Path) -> dict[str, str]:
    """Environment of a server whose sockets and temporary files go away with its scratch folder; what it has compiled
    stays.
    """
    folder = scratch / "tmp"
    if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:  # on a machine without /dev/shm
        return {}
    folder.mkdir(exist_ok=True)
    compiled = {name: OF_THE_SHELL.get(name) or str(user_cache(kept)) for name, kept in COMPILED.items()}
    return {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder), **compiled}
