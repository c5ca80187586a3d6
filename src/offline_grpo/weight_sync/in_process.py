"""Weight sync for a client that samples from the trained module itself: nothing moves, and only the version changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from offline_grpo.engine.engine import Engine
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import Staged, SyncRequirements, WeightSync


class InProcess(WeightSync):
    """A `WeightSync`: the client's module is the policy's module, so every weight is the same object."""

    name = "in_process"
    interval = 1  # shared weights are always the newest
    requires = SyncRequirements(engines=(), moves="any")

    def attach(self, engine: Engine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Raises ConfigError unless the client samples from the policy's own module."""
        client: Any = engine.client
        if getattr(client, "model", None) is not snapshot.policy.model:
            raise ConfigError(
                f"weight_sync=in_process: {type(client).__name__} does not sample from the trained module; "
                "use generation=transformers, or a weight_sync that moves weights"
            )

    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Staged]:
        """See `WeightSync.staged`. There is one copy of the weights."""
        return nullcontext(Staged(version=version, num_tensors=0, num_bytes=0))
