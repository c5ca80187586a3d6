"""LoRA adapters are swapped over HTTP while the server runs, with CUDA graphs on.

Every push has a name of its own. vLLM keys its prefix cache on the name, requests in flight finish on the adapter they began with, and the
`load_inplace` option, which makes the server read the adapter from disk again at every step, is never used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.engine.vllm import EXTENSION_FOLDER
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.model.policy import Policy
from offline_grpo.types import ServedWeights
from offline_grpo.weight_sync.proof import Proof, prove
from offline_grpo.weight_sync.saving import save_weights
from offline_grpo.weight_sync.server_sync import Moved, ServerSync

LORA_KERNELS = os.environ.get("VLLM_TUNED_CONFIG_FOLDER") or str(EXTENSION_FOLDER / "lora_kernels")
"""Settings of vLLM's LoRA kernels that are faster for few tokens (`benchmarks/lora_kernels.py`); on other GPUs vLLM uses its own."""


@dataclass(kw_only=True)
class LoraHotswap(ServerSync):
    """Needs no pause, and of a server that was found only --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""

    moves = "lora"
    variables = {"VLLM_TUNED_CONFIG_FOLDER": LORA_KERNELS}  # noqa: RUF012

    _tag: str = field(default_factory=lambda: f"{os.getpid()}-{uuid.uuid4().hex[:6]}", init=False)
    _pushes: int = field(default=0, init=False)
    _loaded: list[tuple[str, Path]] = field(default_factory=list, init=False)  # newest last

    def attach(self, policy: Policy) -> None:
        """A new server has none of our adapters."""
        self._loaded = []

    def deliver(self, policy: Policy, version: int) -> Moved:
        """Write to shared memory, load under a new name, switch, unload the old one."""
        self._pushes += 1
        name = f"policy-{self._tag}-{self._pushes}"
        folder = self.server.scratch / name
        num_bytes = save_weights(policy, folder, with_tokenizer=False)
        self.control.load_adapter(name, str(folder))
        self.client.weights = ServedWeights(version, name)
        self._loaded.append((name, folder))
        if len(self._loaded) > 1:
            self.control.unload_adapter(self._loaded[-2][0])
        for _, old in self._loaded[:-2]:  # the one before last may still be read by requests in flight
            shutil.rmtree(old, ignore_errors=True)
        self._loaded = self._loaded[-2:]
        return Moved(num_tensors=len(policy.masters.parameters), num_bytes=num_bytes, paused_seconds=0.0)

    def close(self) -> None:
        """A server that was found forgets the last adapter, whose folder goes now."""
        if self._loaded and not self.server.is_managed:
            with contextlib.suppress(EngineError):
                self.control.unload_adapter(self._loaded[-1][0])
        super().close()

    def check(self, client_class: type, *, lora_rank: int | None) -> None:
        """See `ServerSync.check`."""
        super().check(client_class, lora_rank=lora_rank)
        check_rank(lora_rank, self.server_args)

    def check_served(self) -> None:
        """Nothing to ask: a server that did not have the adapter would have refused the requests, which name it."""

    def prove(self, policy: Policy, version: int) -> Proof:
        """The name in each request is the proof of the version; the probe proves the weights."""
        return prove(policy, self.client, None, version=version, tolerance_nats=self.tolerance_nats)


def check_rank(rank: int | None, server_args: Any) -> None:
    """Raise ConfigError if adapters of that rank are more than the server makes room for."""
    room = server_args.get("max_lora_rank", 16)
    if rank is not None and rank > room:
        raise ConfigError(
            f"weight_sync.server_args.max_lora_rank={room}: the adapters have rank {rank}; set it to the next of 16, 32, 64, 128, ..."
        )
