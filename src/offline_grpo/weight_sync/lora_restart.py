"""The adapter is saved and the server started again with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.lora_hotswap import LORA_KERNELS, check_rank
from offline_grpo.weight_sync.restart import Restart
from offline_grpo.weight_sync.server_sync import ServerSync

ADAPTER = "policy-adapter"


@dataclass(kw_only=True)
class LoraRestart(Restart):
    """See `Restart`. The base model is what the server is started with, every time."""

    moves = "lora"
    variables = {"VLLM_TUNED_CONFIG_FOLDER": LORA_KERNELS}  # noqa: RUF012
    serves = (VllmClient,)

    def start_model(self, policy: Policy) -> str:
        """The base model."""
        return ServerSync.start_model(self, policy)

    def start_options(self, policy: Policy) -> Mapping[str, Any]:
        """The newest adapter, under a name that requests then carry."""
        if self._folder is None:
            self._save(policy, 0)
        self.client.weights = replace(self.client.weights, name=ADAPTER)
        return {"lora_modules": [f"{ADAPTER}={self._folder}"]}

    def check(self, client_class: type, *, lora_rank: int | None) -> None:
        """See `ServerSync.check`."""
        super().check(client_class, lora_rank=lora_rank)
        check_rank(lora_rank, self.server_args)
