"""A weight-sync strategy: how the policy's weights get into an engine. `deployment.py` says when, and into which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from offline_grpo.engine.engine import Engine
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineDied, EngineError, require
from offline_grpo.weight_sync.proof import Probe, Proof, prove
from offline_grpo.weight_sync.snapshot import Snapshot, weights_tag

STARTED_ANEW = "the server was started anew and has none of the weights pushed to it."


@dataclass(frozen=True, kw_only=True)
class SyncRequirements:
    """What a strategy needs of the rest of a run."""

    engine: type[Engine]  # what it can update: an instance of this class
    pause_mode: str | None = None  # which an engine must be able to load weights in
    # all weights, or adapters; "any" where trainer and engine share them; "nothing" where the engine keeps its own
    moves: Literal["full", "lora", "any", "nothing"] = "full"
    max_lora_rank: int | None = None  # that a server of the run makes room for; None where no adapters move
    own_server: bool = False  # the run must have started the server
    one_engine: bool = False  # it cannot serve several engines at once
    gpu: bool = False  # weights travel from GPU to GPU alone
    # GPUs of a server of the run: the same as the first training process's, or others than all of theirs
    placement: Literal["same", "other", "any"] = "any"
    server_args: Mapping[str, Any] = field(default_factory=dict)  # on the server's command line
    env: Mapping[str, str] = field(default_factory=dict)  # in its environment
    in_flight: tuple[str, ...] = ()  # what a push can do to requests that run; empty: there must be none
    shares_weights: bool = False  # the policy is loaded on the CPU, and moved into the server's memory by `attach`


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The weights that a push delivers to every engine; a strategy's own class adds where they are."""

    version: int  # that the engines serve afterwards
    name: str = ""  # of the weights in requests ("": the engine's base model)
    num_tensors: int
    num_bytes: int  # copied to an engine, or written once for all of them


class WeightSync:
    """A component of the group `weight_sync`. Inherit from `ServerSync`, unless no weights are copied.

    Its methods get an `Engine` that `requires` allows.

    Attributes:
        name: the option's name in conf/weight_sync.
        interval: push every N iterations; the training loop counts.
        requires: of the rest of the run.
    """

    name: ClassVar[str]
    interval: Any
    requires: Any

    def start_words(self, snapshot: Snapshot, *, is_recovery: bool) -> tuple[str, Mapping[str, object]]:
        """What engines start from, a folder or hub id, and arguments of their command line for that start alone.

        Args:
            is_recovery: an engine has died, and a push follows. Its model is the one before training: the checkpoint
                that the run resumed from, which the policy was loaded from, may be deleted by then.
        """
        policy = snapshot.policy
        return policy.tokenizer.name_or_path if is_recovery else str(policy.causal_lm.name_or_path), {}

    def attach(self, engine: Any, snapshot: Snapshot) -> None:
        """Prepare the path to an engine that has just started: before masters and optimizer exist, and again if it was
        started anew in the middle of a run. Raises ConfigError for an engine or a policy that this strategy cannot work
        with; nothing has been changed then.
        """

    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Any]:
        """The part of a push that is done once for all engines: yields a `Staged` for `deliver`, and cleans up when all
        engines have it. This one moves nothing; a frozen engine stays at version 0.
        """
        version = 0 if self.requires.moves == "nothing" else version
        return nullcontext(Staged(version=version, num_tensors=0, num_bytes=0))

    def deliver(self, engines: Sequence[Any], staged: Any) -> float:
        """Give all engines what was staged, at the same time. Idempotent. Each pauses, which flushes or hides a prefix
        cache, writes the weights, waits until its device has them, notes version and run (the tag), and resumes.
        Returns the longest pause of any engine, in seconds.
        """
        return 0.0

    def verify(self, engines: Sequence[Any], snapshot: Snapshot, version: int) -> list[Proof]:
        """Prove that the engines serve the snapshot, a proof for each; none where there is nothing to compare. Raises
        EngineError where one serves something else.
        """
        return []

    def check_served(self, engine: Any, version: int) -> None:
        """See that the engine still has the weights of the last push. Raises EngineDied where it has none since it was
        started anew, EngineError where it has others.
        """

    def detach(self, engine: Any) -> None:
        """Leave an engine behind, before it is stopped; also one that was never attached."""


@dataclass(kw_only=True)
class ServerSync(WeightSync):
    """A `WeightSync` to servers. Subclasses implement `staged` and `deliver`, and set `needs`: what they require under
    all settings. Most need a vLLM server.
    """

    needs: ClassVar[SyncRequirements] = SyncRequirements(engine=VllmEngine)

    interval: int
    tolerance_nats: float
    server_args: Any

    is_tagged: ClassVar[bool] = True
    """The server notes the tags of pushes; False where requests name the version themselves."""

    _probes: dict[Any, Probe] = field(default_factory=dict, init=False)  # of engines, see `prove`

    def __post_init__(self) -> None:
        require(self.interval >= 1, "weight_sync.interval", self.interval, "must be at least 1")
        require(self.tolerance_nats > 0, "weight_sync.tolerance_nats", self.tolerance_nats, "must be above 0")

    @property
    def requires(self) -> SyncRequirements:  # type: ignore[override]
        rank = self.server_args.get("max_lora_rank", 16) if self.needs.moves == "lora" else None  # 16 is vLLM's own
        return replace(self.needs, server_args=self.server_args, max_lora_rank=rank)

    def verify(self, engines: Sequence[Any], snapshot: Snapshot, version: int) -> list[Proof]:
        tag = weights_tag(version) if self.is_tagged else None
        how: Any = {"tag": tag, "tolerance_nats": self.tolerance_nats, "before": self._probes}
        return prove(engines, snapshot, version, **how)

    def check_served(self, engine: Any, version: int) -> None:
        url, found, pushed = engine.base_url, engine.served_tag(), weights_tag(version)
        if found is None:
            raise EngineDied(f"{url}: {STARTED_ANEW}")
        if found != pushed:
            raise foreign_write(url, f"has {f'version {found}' if found else 'others'}, where {pushed} was pushed")


def foreign_write(url: str, found: str) -> EngineError:
    """The error about a server whose weights something else than this run has changed."""
    fix = "give each run a server of its own (generation.base_url=null starts one), and resume with resume=auto"
    what = f"another client has loaded weights into the server: it {found}. Nothing was learnt from its samples"
    return EngineError(f"{url}: {what}; {fix}")


@dataclass(kw_only=True)
class PausingSync(ServerSync):
    """A strategy that pauses the server while weights change. `VllmEngine.pause` says what each mode does to requests
    in flight.
    """

    pause_mode: str

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = f"must be one of {', '.join(VllmEngine.pause_modes)}"
        require(self.pause_mode in VllmEngine.pause_modes, "weight_sync.pause_mode", self.pause_mode, fix)

    @property
    def requires(self) -> SyncRequirements:  # type: ignore[override]
        in_flight = () if self.needs.shares_weights else (self.pause_mode,)
        return replace(super().requires, in_flight=in_flight, pause_mode=self.pause_mode)
