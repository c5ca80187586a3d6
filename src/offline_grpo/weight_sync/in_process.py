"""Strategies that move nothing: for a client that samples from the trained module itself, and for a frozen server."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from offline_grpo.engine.engine import Engine
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import Staged, SyncRequirements, WeightSync

log = logging.getLogger(__name__)


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


class Frozen(WeightSync):
    """A `WeightSync` for servers that nobody may touch: they keep their weights, whatever training makes of the policy.

    Nothing is proven: the server may serve any model. `alignment/*` says how far its logprobs are from the policy's.
    """

    name = "none"
    interval = 1
    requires = SyncRequirements(engines=("vLLM", "SGLang"), moves="nothing")

    def start_model(self, snapshot: Snapshot) -> str:
        """See `WeightSync.start_model`. The model before training, in a resumed run too."""
        return self.recovery_model(snapshot)

    def attach(self, engine: Engine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Says once what every later line of the run means."""
        log.warning(
            "weight_sync=none: the server at %s is frozen. It gets no weights, so what it samples comes from its own "
            "model (version 0) and not from the policy, and alignment/* grows as the policy learns",
            engine.server.base_url,
        )

    def reattach(self, engine: Engine, snapshot: Snapshot) -> None:
        """See `WeightSync.reattach`."""

    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Staged]:
        """See `WeightSync.staged`. The version stays that of the weights that no update has changed."""
        return nullcontext(Staged(version=0, num_tensors=0, num_bytes=0))
