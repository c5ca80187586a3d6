"""No weight sync: the server keeps the weights that it was started with, whatever training makes of the policy."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from offline_grpo.engine.engine import ServerEngine
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import Staged, SyncRequirements, WeightSync

log = logging.getLogger(__name__)


class Frozen(WeightSync):
    """A `WeightSync` for servers that nobody may touch: it asks them for completions and changes nothing.

    Nothing is proven: the server may serve any model. `alignment/*` says how far its logprobs are from the policy's.
    """

    name = "none"
    interval = 1
    requires = SyncRequirements(engines=("vLLM", "SGLang"), moves="nothing")

    def start_model(self, snapshot: Snapshot) -> str:
        """See `WeightSync.start_model`. The model before training, in a resumed run too."""
        return self.recovery_model(snapshot)

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Says once what every later line of the run means."""
        log.warning(
            "weight_sync=none: the server at %s is frozen. It gets no weights, so what it samples comes from its own "
            "model (version 0) and "
            "not from the policy, and alignment/* grows as the policy learns",
            engine.server.base_url,
        )

    def reattach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.reattach`."""

    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Staged]:
        """See `WeightSync.staged`. The version stays that of the weights that no update has changed."""
        return nullcontext(Staged(version=0, num_tensors=0, num_bytes=0))
