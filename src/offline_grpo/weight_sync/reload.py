"""The policy is saved as a checkpoint, in shared memory or on disk, and the running server loads it in place of its weights."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass

from offline_grpo.errors import ConfigError
from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.saving import save_weights
from offline_grpo.weight_sync.server_sync import Moved, PausingSync

LOCATIONS = ("memory", "disk")


@dataclass(kw_only=True)
class Reload(PausingSync):
    """Works with every model and layout that the server can load, quantised and spread ones included.

    Args:
        location: "memory" writes to /dev/shm, "disk" to the run folder. Either way the file is deleted after the push.
    """

    location: str

    serves = (VllmClient, SglangClient)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.location not in LOCATIONS:
            raise ConfigError(f"weight_sync.location={self.location}: must be one of {', '.join(LOCATIONS)}")

    def deliver(self, policy: Policy, version: int) -> Moved:
        """Saving happens before the pause: only loading stops the server."""
        folder = (self.server.scratch if self.location == "memory" else self.server.log_dir) / f".push_{version}"
        try:
            num_bytes = save_weights(policy, folder, with_tokenizer=True)
            started = time.perf_counter()
            self.control.load_weights(str(folder), version=version, pause_mode=self.pause_mode)
            paused_seconds = time.perf_counter() - started
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Moved(num_tensors=len(list(policy.causal_lm.parameters())), num_bytes=num_bytes, paused_seconds=paused_seconds)

    def check(self, client_class: type, *, lora_rank: int | None) -> None:
        """See `ServerSync.check`."""
        super().check(client_class, lora_rank=lora_rank)
        if issubclass(client_class, SglangClient) and self.pause_mode != "abort":
            raise ConfigError(
                f"weight_sync.pause_mode={self.pause_mode}: SGLang loads weights only where no request is in flight; set "
                "weight_sync.pause_mode=abort"
            )
