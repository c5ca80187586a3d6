"""Weight sync for a client that samples from the trained module itself: nothing moves, only the version is told."""

from __future__ import annotations

from typing import Any

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RolloutClient
from offline_grpo.types import ServedWeights, SyncReport


class InProcess:
    """The client's module is the policy's module, so every weight is covered by being the same object."""

    shares_weights = False  # there is no other memory to move to

    interval = 1  # shared weights are always the newest

    def __init__(self) -> None:
        self._client: RolloutClient | None = None

    def check(self, client_class: type[RolloutClient], *, lora_rank: int | None) -> None:
        """See `WeightSync.check`."""
        if client_class.engine_name is not None:
            raise ConfigError(
                f"weight_sync=in_process: {client_class.__name__} does not sample from the trained module; choose a weight_sync that moves "
                "weights to it, such as shared_vllm, reload, or with LoRA lora_hotswap"
            )

    def connect(self, policy: Any, client: RolloutClient) -> None:
        """Raises ConfigError unless the client samples from the policy's own module."""
        if getattr(client, "model", None) is not policy.model:
            raise ConfigError(
                f"weight_sync=in_process: {type(client).__name__} does not sample from the trained module; "
                "use generation=transformers, or a weight_sync that moves weights"
            )
        self._client = client

    def push(self, policy: Any, *, version: int) -> SyncReport:
        """Tell the client which version the shared weights have."""
        assert self._client is not None, "push() before connect()"
        self._client.weights = ServedWeights(version)
        return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)

    def check_served(self) -> None:
        """There are no other weights that the client could sample from."""

    def recover(self, policy: Any, *, version: int) -> None:
        """Never called: this process is the engine."""
        raise AssertionError("a client in this process cannot die alone")

    def close(self) -> None:
        """There is nothing to let go of."""
