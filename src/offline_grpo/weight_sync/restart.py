"""The basic strategy: save a checkpoint, and restart the server from it. Slow, but works with any engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from offline_grpo.engine.engine import next_to_start
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.weight_sync.snapshot import Snapshot, save_weights, weights_tag
from offline_grpo.weight_sync.strategy import ServerSync, Staged, SyncRequirements

MODEL = "model"
Bits = Mapping[str, str]
"""Fingerprints: which weights something was made from."""


@dataclass(frozen=True, kw_only=True)
class StagedStart(Staged):
    """What a server starts from, which weights that gives it, and when the first was stopped for it."""

    model: str
    args: Mapping[str, object]
    bits: Bits
    began_s: float


@dataclass(kw_only=True)
class Restart(ServerSync):
    """Only for managed servers. The weights being served are in the run folder's `served/` until the next push."""

    name = "restart"
    needs = SyncRequirements(engine=ServerEngine, own_server=True)
    adapter: ClassVar[str] = ""  # name of the weights in requests, where they are an adapter beside the base model

    _folder: Path | None = field(default=None, init=False)
    _saved: Bits = field(default_factory=dict, init=False)  # what `_folder` holds
    _started_from: dict[ServerEngine, Bits] = field(default_factory=dict, init=False)
    _num_saves: int = field(default=0, init=False)

    def start_words(self, snapshot: Snapshot, *, is_recovery: bool) -> tuple[str, Mapping[str, object]]:
        """The newest weights, which are saved for a recovery, and adapters for every start: the base model has none."""
        if is_recovery or self.adapter:
            self._save(snapshot)
        base, _ = super().start_words(snapshot, is_recovery=False)
        if self.adapter:
            return base, {"lora_modules": [f"{self.adapter}={self._folder}"]}
        return base if self._folder is None else str(self._folder.with_name(MODEL)), {}

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """The server has just been started from these very weights."""
        self._started_from[engine] = snapshot.fingerprints

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedStart]:
        """Weights that all servers already serve are not saved again."""
        bits = snapshot.fingerprints
        stale = [engine for engine, theirs in self._started_from.items() if theirs != bits or engine.has_lost_weights]
        num_bytes = self._save(snapshot) if stale else 0
        (model, args), began_s = self.start_words(snapshot, is_recovery=False), time.perf_counter()

        # Stale servers stop and start again: first those that share no GPU. `deliver` awaits these and starts the rest.
        for engine in stale:
            self._started_from[engine] = {}
            engine.stop()
        for engine in next_to_start(stale):
            engine.begin(model, args)
        start = {"model": model, "args": args, "bits": bits, "began_s": began_s}
        yield StagedStart(version=version, name=self.adapter, num_tensors=0, num_bytes=num_bytes, **start)

    def deliver(self, engines: Sequence[ServerEngine], staged: StagedStart) -> float:
        """Starts overlap: `staged` has begun them. A server that already has these weights only gets the version."""
        paused_seconds = 0.0
        for engine in engines:
            if self._started_from[engine] != staged.bits:
                engine.start(staged.model, staged.args)
                self._started_from[engine] = staged.bits
                paused_seconds = time.perf_counter() - staged.began_s
            engine.set_tag(weights_tag(staged.version))
        return paused_seconds

    def detach(self, engine: ServerEngine) -> None:
        """Deletes the served weights: checkpoints are elsewhere."""
        if self._folder is not None:
            shutil.rmtree(self._folder.parent, ignore_errors=True)

    def _save(self, snapshot: Snapshot) -> int:
        """Save the weights, unless they were the last saved. Returns the size in bytes."""
        if self._folder is not None and self._saved == snapshot.fingerprints:
            return 0

        # vLLM would compile anew for a new path, so servers load a link, which names the newest folder.
        self._num_saves += 1
        folder = snapshot.host.log_dir / "served" / str(self._num_saves)
        num_bytes = save_weights(snapshot, folder)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        link = folder.with_name(MODEL)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        self._folder, self._saved = folder, snapshot.fingerprints
        return num_bytes
