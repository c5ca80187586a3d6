"""The adapter is saved and the server started again with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from offline_grpo.weight_sync.lora_hotswap import lora_requirements
from offline_grpo.weight_sync.restart import Restart, StagedStart
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import SyncRequirements

ADAPTER = "policy-adapter"


@dataclass(kw_only=True)
class LoraRestart(Restart):
    """See `Restart`. The base model is what the server is started with, every time, and the adapter is named on its
    command line.
    """

    name = "lora_restart"

    @property
    def requires(self) -> SyncRequirements:
        """See `WeightSync.requires`."""
        return replace(lora_requirements(self.server_args), own_server=True)

    def start_args(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """See `WeightSync.start_args`. The newest adapter, under a name that requests then carry."""
        self._save(snapshot)
        return {"lora_modules": [f"{ADAPTER}={self._folder}"]}

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedStart]:
        """See `Restart.staged`."""
        with super().staged(snapshot, version) as staged:
            yield replace(staged, name=ADAPTER)

    def _model(self, snapshot: Snapshot) -> str:
        return self.start_model(snapshot)
