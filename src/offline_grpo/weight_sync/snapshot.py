"""The policy's weights as a push reads them, and the tag that they leave in a server."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from offline_grpo.engine.inside_vllm.offline_grpo_weights import texts, totals
from offline_grpo.errors import EngineError, reason_of
from offline_grpo.model.layers import text_parameters
from offline_grpo.model.policy import Policy, buckets, save_adapter, save_policy
from offline_grpo.model.quantization import dequantized

Named = tuple[str, Tensor]
BUCKET_BYTES = 2**30  # of weights that are looked at together: whole ones, where the policy's are spread over processes
FullWeights = Callable[[Policy], Iterator[tuple[str, Tensor]]]
"""The whole of each parameter of a policy, by its name in the checkpoint, one after the other. See
`Sharding.full_weights`.
"""
_DRAWN = uuid.uuid4().hex[:8]  # at the import, and not when it is first asked for: several threads ask at the same time


@dataclass(frozen=True)
class Snapshot:
    """The policy's weights as they are now, read through one place.

    Args:
        host: the first engine; what all engines read lies in its server's folders, and is deleted with them.
    """

    policy: Policy
    full_weights: FullWeights
    host: Any
    _totals: dict[tuple[str, ...], Tensor] = field(default_factory=dict, init=False)  # of buckets: [N], see `totals`

    def text_weights(self) -> Iterator[Named]:
        """Those that text goes through, dequantised: a composite's tower stays as it was."""
        text = text_parameters(self.policy.causal_lm)
        weights = self.full_weights(self.policy)
        return ((name, dequantized(tensor, text[name])) for name, tensor in weights if name in text)

    def text_buckets(self, max_bytes: int) -> Iterator[list[Named]]:
        """Those, several at a time. Weights that are spread over processes are fingerprinted on the way, while they are
        whole.
        """
        for bucket in buckets(self.text_weights(), max_bytes):
            yield bucket
            if self.policy.is_sharded:
                self._note(bucket)

    def _note(self, bucket: list[Named]) -> None:
        self._totals[tuple(name for name, _ in bucket)] = totals((tensor, 0) for _, tensor in bucket)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """64 bits for each parameter that text goes through, by name."""
        if not self._totals:
            for bucket in buckets(self.text_weights(), BUCKET_BYTES):
                self._note(bucket)
        found = texts(torch.cat(list(self._totals.values())))
        return dict(zip((name for names in self._totals for name in names), found, strict=True))


def this_run() -> str:
    """A name for this process among all that may push weights to a server."""
    return f"{os.getpid()}-{_DRAWN}"


def weights_tag(version: int) -> str:
    """What a push leaves in a server: the version of the weights, and whose they are."""
    return f"{version} of run {this_run()}"


def save_weights(snapshot: Snapshot, folder: Path) -> int:
    """Write the model with its tokenizer, or its adapter alone, for servers to load. Returns the size in bytes. Raises
    EngineError where there is no room or no permission; nothing is left behind.
    """
    # A push that failed may have left the folder.
    shutil.rmtree(folder, ignore_errors=True)
    save = save_policy if snapshot.policy.lora_rank is None else save_adapter
    try:
        save(snapshot.policy, snapshot.full_weights(snapshot.policy), folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        fix = "make room there; /dev/shm is as large as a container's --shm-size, or use weight_sync.location=disk"
        raise EngineError(f"the weights cannot be saved to {folder} ({reason_of(error)}); {fix}") from error
    return sum(path.stat().st_size for path in folder.iterdir())


def gpu_uuid(device: torch.device) -> str | None:
    """The physical GPU behind a device, None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
