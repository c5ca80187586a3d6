"""The policy is saved as a checkpoint, in shared memory or on disk, and the running server loads it in place of its
weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.engine.streaming import at_once
from offline_grpo.errors import require
from offline_grpo.weight_sync.snapshot import Snapshot, save_weights, weights_tag
from offline_grpo.weight_sync.strategy import PausingSync, Staged, SyncRequirements

LOCATIONS = ("memory", "disk")


@dataclass(frozen=True, kw_only=True)
class StagedFolder(Staged):
    """Weights saved in a folder."""

    folder: Path


@dataclass(kw_only=True)
class Reload(PausingSync):
    """Works with every model and layout that the server can load, quantised and spread ones included."""

    location: str

    name = "reload"
    needs = SyncRequirements(engine=ServerEngine)

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = f"must be one of {', '.join(LOCATIONS)}"
        require(self.location in LOCATIONS, "weight_sync.location", self.location, fix)

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedFolder]:
        """Saving happens before the pause: only loading stops the servers."""
        host = snapshot.host
        folder = (host.scratch if self.location == "memory" else host.log_dir) / f".push_{version}"
        try:
            num_bytes = save_weights(snapshot, folder)
            num_tensors = len(list(snapshot.policy.causal_lm.parameters()))
            yield StagedFolder(version=version, num_tensors=num_tensors, num_bytes=num_bytes, folder=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def deliver(self, engines: Sequence[ServerEngine], staged: StagedFolder) -> float:
        started, folder, tag = time.perf_counter(), str(staged.folder), weights_tag(staged.version)

        def load(engine: ServerEngine) -> None:
            engine.load_weights(folder, tag=tag, pause_mode=self.pause_mode)

        at_once(load, engines)
        return time.perf_counter() - started
