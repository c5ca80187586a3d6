"""Weight sync for a client that samples from the trained module itself: nothing moves, only the version is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from offline_grpo.engine.engine import Engine
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.requirements import SyncRequirements
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import Staged


@runtime_checkable
class SamplesFromModule(Protocol):
    """A client that shows the module which it samples from."""

    model: Any


class InProcess:
    """A `WeightSync`: the client's module is the policy's module, so every weight is covered by being the same object."""

    name = "in_process"
    interval = 1  # shared weights are always the newest
    requires = SyncRequirements(engines=(), moves="any")

    def start_model(self, snapshot: Snapshot) -> str:
        """See `WeightSync.start_model`. Nothing is started."""
        return ""

    recovery_model = start_model

    def start_args(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """See `WeightSync.start_args`."""
        return {}

    def attach(self, engine: Engine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Raises ConfigError unless the client samples from the policy's own module."""
        client = engine.client
        if not isinstance(client, SamplesFromModule) or client.model is not snapshot.policy.model:
            raise ConfigError(
                f"weight_sync=in_process: {type(client).__name__} does not sample from the trained module; "
                "use generation=transformers, or a weight_sync that moves weights"
            )

    reattach = attach

    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Staged]:
        """See `WeightSync.staged`."""
        return nullcontext(Staged(version=version, num_tensors=0, num_bytes=0))

    def deliver(self, engines: Sequence[Engine], staged: Staged) -> float:
        """See `WeightSync.deliver`. The engine has the weights already."""
        return 0.0

    def verify(self, engines: Sequence[Engine], snapshot: Snapshot, version: int) -> list[Proof]:
        """See `WeightSync.verify`. There is one copy of the weights, and nothing to compare it with."""
        return []

    def check_served(self, engine: Engine, version: int) -> None:
        """See `WeightSync.check_served`. There are no other weights that the client could sample from."""

    def detach(self, engine: Engine) -> None:
        """See `WeightSync.detach`."""
