"""vLLM's own weight-transfer engine (0.25 to 0.32): the protocol that `ipc` and `nccl` share.

    init once; then pause -> start -> update (names, dtypes, shapes; the data travels beside) -> finish -> flush -> resume

Names and shapes are those of the checkpoint; the server fuses and splits them as when it loads one. Without packing, the payloads of
both versions are the same.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offline_grpo.engine.engine import ServerEngine
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.server_sync import PausingSync
from offline_grpo.weight_sync.snapshot import Snapshot, weights_tag
from offline_grpo.weight_sync.strategy import Staged

Named = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class StagedBuckets(Staged):
    """Parameters, as many together as go into one update."""

    buckets: Sequence[Sequence[Named]]


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

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedBuckets]:
        """See `WeightSync.staged`."""
        named = list(snapshot.weights())
        num_bytes = sum(tensor.nbytes for _, tensor in named)
        filled = list(buckets(named, self.bucket_mib * 2**20))
        yield StagedBuckets(version=version, num_tensors=len(named), num_bytes=num_bytes, buckets=filled)

    def apply(self, engine: ServerEngine, staged: StagedBuckets) -> float:
        """See `WeightSync.apply`. Pause for the whole update: parameters have no storage between start and finish."""
        started = time.perf_counter()
        control = engine.control
        with control.paused(self.pause_mode):
            control.post("/start_weight_update")
            for bucket in staged.buckets:
                self.send(
                    engine,
                    bucket,
                    {
                        "names": [name for name, _ in bucket],
                        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                        "shapes": [list(tensor.shape) for _, tensor in bucket],
                    },
                )
            control.post("/finish_weight_update", {}, timeout_s=600)
            control.reset_prefix_cache()
            control.set_tag(weights_tag(staged.version))
        return time.perf_counter() - started

    @abstractmethod
    def send(self, engine: ServerEngine, bucket: Sequence[Named], update_info: dict[str, Any]) -> None:
        """One update: tell the server what comes (`update_info` holds names, dtype_names and shapes), and hand it over."""


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
