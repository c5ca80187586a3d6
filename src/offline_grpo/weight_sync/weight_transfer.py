"""vLLM's own weight-transfer engine (0.25 to 0.32): the protocol that `ipc` and `nccl` share.

    init once; then pause -> start -> update (names, dtypes, shapes; the data travels beside) -> finish -> flush -> resume

Names and shapes are those of the checkpoint; the server fuses and splits them as when it loads one. Without packing, the payloads of
both versions are the same.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offline_grpo.errors import ConfigError
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.server_sync import Moved, PausingSync

Named = tuple[str, Tensor]


@dataclass(kw_only=True)
class WeightTransfer(PausingSync):
    """A `WeightSync` through /init_weight_transfer_engine, /start_weight_update, /update_weights and /finish_weight_update.

    Args:
        bucket_mib: parameters sent in one update, in MiB.
    """

    bucket_mib: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_mib < 1:
            raise ConfigError(f"weight_sync.bucket_mib={self.bucket_mib}: must be at least 1")

    @abstractmethod
    def send(self, bucket: Sequence[Named], update_info: dict[str, Any]) -> None:
        """One update: tell the server what comes (`update_info` holds names, dtype_names and shapes), and hand it over."""

    def deliver(self, policy: Policy, version: int) -> Moved:
        """A step between start and finish would end the server, whose parameters have no memory then: hence the pause around all."""
        named = [(name, p.data) for name, p in policy.causal_lm.named_parameters()]
        started = time.perf_counter()
        with self.control.paused(self.pause_mode):
            self.control.post("/start_weight_update")
            for bucket in buckets(named, self.bucket_mib * 2**20):
                self.send(
                    bucket,
                    {
                        "names": [name for name, _ in bucket],
                        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                        "shapes": [list(tensor.shape) for _, tensor in bucket],
                    },
                )
            self.control.post("/finish_weight_update", {}, timeout_s=600)
            self.control.reset_prefix_cache()
            self.control.set_version(version)
        paused_seconds = time.perf_counter() - started
        return Moved(len(named), sum(tensor.nbytes for _, tensor in named), paused_seconds)


def buckets(named: Sequence[Named], max_bytes: int) -> Iterator[list[Named]]:
    """In order, as many tensors at a time as fit into `max_bytes`; a larger one goes alone."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
