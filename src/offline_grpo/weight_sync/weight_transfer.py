"""vLLM's own weight-transfer engine (0.25 to 0.32): the protocol that `ipc` and `nccl` share.

    init once; then pause -> start -> update (names, dtypes, shapes; the data travels beside) -> finish -> flush ->
    resume

Names and shapes are those of the checkpoint; the server fuses and splits them as when it loads one. Without packing,
the payloads of both versions are the same.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offline_grpo.engine.background import at_once
from offline_grpo.engine.engine import ServerEngine
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.snapshot import Named, Snapshot, buckets, weights_tag
from offline_grpo.weight_sync.strategy import PausingSync, Staged


@dataclass(frozen=True, kw_only=True)
class StagedWeights(Staged):
    """Weights that are read as they are sent, a bucket at a time."""

    snapshot: Snapshot


@dataclass(kw_only=True)
class WeightTransfer(PausingSync):
    """A `WeightSync` through /init_weight_transfer_engine, /start_weight_update, /update_weights and
    /finish_weight_update.

    Args:
        bucket_mib: parameters sent in one update, in MiB.
    """

    bucket_mib: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_mib < 1:
            raise ConfigError(f"weight_sync.bucket_mib={self.bucket_mib}: must be at least 1")

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedWeights]:
        """See `WeightSync.staged`."""
        policy, named = snapshot.policy, list(snapshot.policy.causal_lm.parameters())
        num_bytes = sum(p.numel() * (policy.dtype if policy.is_sharded else p.dtype).itemsize for p in named)
        yield StagedWeights(version=version, num_tensors=len(named), num_bytes=num_bytes, snapshot=snapshot)

    def deliver(self, engines: Sequence[ServerEngine], staged: StagedWeights) -> float:
        """See `WeightSync.deliver`. All engines get a bucket before the next one is read, because the policy's weights
        are read once.

        They are paused for the whole update: parameters have no storage between start and finish. After an error they
        stay paused.
        """
        started = time.perf_counter()
        at_once(lambda engine: self._begin(engine, staged), engines)
        for bucket in buckets(staged.snapshot.weights(), self.bucket_mib * 2**20):
            self.send(
                engines,
                bucket,
                {
                    "names": [name for name, _ in bucket],
                    "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                },
            )
        at_once(lambda engine: self._finish(engine, weights_tag(staged.version)), engines)
        return time.perf_counter() - started

    def _begin(self, engine: ServerEngine, staged: StagedWeights) -> None:
        engine.control.pause(self.pause_mode, self.check_replaced(engine, staged))
        engine.control.post("/start_weight_update")

    def _finish(self, engine: ServerEngine, tag: str) -> None:
        control = engine.control
        control.post("/finish_weight_update", {}, timeout_s=600)
        control.reset_prefix_cache()
        control.set_tag(tag)
        control.resume()

    @abstractmethod
    def send(self, engines: Sequence[ServerEngine], bucket: Sequence[Named], update_info: dict[str, Any]) -> None:
        """One update: tell the servers what comes (`update_info` holds names, dtype_names and shapes), and hand it over
        to all.
        """
