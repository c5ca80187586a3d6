"""What a weight-sync strategy is: how the policy's weights get into an engine. `deployment.py` says when, and for which
engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.requirements import SyncRequirements
from offline_grpo.weight_sync.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What a push delivers to every engine; a strategy's own class adds where the staged weights are: a folder,
    buffers.

    Args:
        version: that the engines serve afterwards.
        name: what requests must call the weights ("": the engine's base model).
        num_bytes: copied to an engine, or written once for all of them.
        replaces: the version that an engine must still have when it is paused, for those that have requests under
            way. See `check_served`.
    """

    version: int
    name: str = ""
    num_tensors: int
    num_bytes: int
    replaces: Mapping[Any, int] = field(default_factory=dict)


@runtime_checkable
class WeightSync(Protocol):
    """A component of the group `weight_sync`. Inherit from `ServerSync`, unless no weights are copied.

    Args of its methods: `engine` is an `Engine` that `requires` allows, hence a `ServerEngine` for strategies with
    `requires.engines`.
    """

    @property
    def name(self) -> str:
        """The option's name in conf/weight_sync."""
        ...

    @property
    def interval(self) -> int:
        """Push every N iterations; the training loop counts."""
        ...

    @property
    def requires(self) -> SyncRequirements:
        """What the rest of the run must have, or do."""
        ...

    def start_model(self, snapshot: Snapshot) -> str:
        """The folder or hub id that engines start from when the run connects."""
        ...

    def recovery_model(self, snapshot: Snapshot) -> str:
        """The folder or hub id that an engine starts from after its death; a push follows."""
        ...

    def start_args(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Arguments of an engine's command line for its next start alone."""
        ...

    def attach(self, engine: Any, snapshot: Snapshot) -> None:
        """Prepare the path to an engine that has just started, before masters and optimizer exist.

        Raises:
            ConfigError: an engine or a policy that this strategy cannot work with; nothing has been changed.
        """
        ...

    def reattach(self, engine: Any, snapshot: Snapshot) -> None:
        """Prepare the path again, to an engine that was started anew in the middle of a run."""
        ...

    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Any]:
        """What a push does once for all engines: yields a `Staged` for `deliver`, and cleans up when all engines have
        it.
        """
        ...

    def deliver(self, engines: Sequence[Any], staged: Any) -> float:
        """Give all engines what was staged, at the same time. Idempotent.

        Each pauses, writes the weights, waits until its device has them, flushes its prefix cache, notes version and
        run (the tag), and resumes.

        Returns the longest pause of any engine, in seconds.
        """
        ...

    def verify(self, engines: Sequence[Any], snapshot: Snapshot, version: int) -> list[Proof]:
        """Prove that the engines serve the snapshot, a proof for each; none where there is nothing to compare.

        Raises:
            EngineError: one serves something else.
        """
        ...

    def check_served(self, engine: Any, version: int) -> None:
        """See that the engine still has the weights of the last push.

        Raises:
            EngineDied: it has none since it was started anew.
            EngineError: it has others.
        """
        ...

    def detach(self, engine: Any) -> None:
        """Leave an engine behind, before it is stopped; also one that was never attached."""
        ...
