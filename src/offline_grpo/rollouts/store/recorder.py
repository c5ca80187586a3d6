"""Writes the store of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.disk import write_whole
from offline_grpo.interfaces import RunListener
from offline_grpo.rollouts.store.origin import FOLDER, Origin, file_name, json_hash
from offline_grpo.types import Metrics, RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recorder(RunListener):
    """Writes `rollouts/iter_000.parquet`, ... and, for evaluations, `rollouts/eval_init.parquet`, ...

    A file is complete or absent, and the same again if a resumed run repeats the iteration. It is written in a thread,
    beside the updates. `log` waits for it: as the first listener, the store has every iteration that has metrics.

    Args:
        origin: what all files have in common.
        weights: the version of the trainer's weights, and those that training changes, as they are now.
    """

    output_dir: Path
    origin: Origin
    weights: Callable[[], tuple[int, list[Tensor]]]
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"), init=False)
    _writing: list[Future[None]] = field(default_factory=list, init=False)

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Sequence[Sequence[float]] | None, iteration: int
    ) -> None:
        from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints

        version, tensors = self.weights()
        # now, before the updates change them
        origin = replace(self.origin, version=version, weights=json_hash(fingerprints(tensors)))
        self._writing.append(self._thread.submit(self._write, name, groups, advantages, iteration, origin))

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        """Waits until what was sampled so far is on disk.

        Raises:
            OSError: it cannot be written.
        """
        while self._writing:
            self._writing.pop(0).result()

    def close(self) -> None:
        """Waits as well, and ignores errors: the iteration has no metrics, so a resumed run repeats it."""
        self._thread.shutdown()

    def _write(self, name: str, groups: Any, advantages: Any, iteration: int, origin: Origin) -> None:
        # pyarrow takes half a second, which no start shall wait for
        from offline_grpo.rollouts.store.rows import parquet, table_of

        content = parquet(table_of(name, groups, advantages, iteration), origin.to_metadata())
        folder = self.output_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / file_name(name, iteration), content)
