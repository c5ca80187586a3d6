"""What the strategies that serve from another process share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from offline_grpo.engine.background import at_once
from offline_grpo.engine.engine import ServerEngine
from offline_grpo.errors import ConfigError, EngineDied, EngineError
from offline_grpo.weight_sync.proof import Proof, ask, compare, probe_prompts
from offline_grpo.weight_sync.requirements import SyncRequirements
from offline_grpo.weight_sync.snapshot import Snapshot, weights_tag
from offline_grpo.weight_sync.strategy import Staged

PAUSE_MODES = ("keep", "wait", "abort")
STARTED_ANEW = "the server was started anew and has none of the weights pushed to it."


@dataclass(kw_only=True)
class ServerSync(ABC):
    """A `WeightSync` to servers. Subclasses say how the weights travel, in `staged` and `deliver`.

    Args:
        interval: push at every N-th opportunity, and always before an evaluation. In between the server samples
            from an older policy.
        tolerance_nats: largest mean difference |trainer - server| of the probe's logprobs; above it the run stops.
        server_args: options that the server needs for this strategy, added to `engine.args`.
    """

    interval: int
    tolerance_nats: float
    server_args: Any

    name: ClassVar[str]
    is_tagged: ClassVar[bool] = True
    """The server notes the tags of pushes; False where requests name the version themselves."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"weight_sync.interval={self.interval}: must be at least 1")
        if self.tolerance_nats <= 0:
            raise ConfigError(f"weight_sync.tolerance_nats={self.tolerance_nats}: must be above 0")

    @property
    def requires(self) -> SyncRequirements:
        """See `WeightSync.requires`. Most strategies use what vLLM alone can do."""
        return SyncRequirements(engines=("vLLM",), server_args=self.server_args)

    def start_model(self, snapshot: Snapshot) -> str:
        """See `WeightSync.start_model`. What the policy was loaded from."""
        return str(snapshot.policy.causal_lm.name_or_path)

    def recovery_model(self, snapshot: Snapshot) -> str:
        """See `WeightSync.recovery_model`. The model before training: the checkpoint that the run went on from may be
        deleted by then.
        """
        return snapshot.policy.tokenizer.name_or_path

    def start_args(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """See `WeightSync.start_args`."""
        return {}

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:  # noqa: B027 - most strategies need nothing here
        """See `WeightSync.attach`."""

    def reattach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.reattach`."""
        self.attach(engine, snapshot)

    def detach(self, engine: ServerEngine) -> None:  # noqa: B027 - most strategies leave nothing behind
        """See `WeightSync.detach`."""

    @abstractmethod
    def staged(self, snapshot: Snapshot, version: int) -> AbstractContextManager[Any]:
        """See `WeightSync.staged`."""

    @abstractmethod
    def deliver(self, engines: Sequence[ServerEngine], staged: Any) -> float:
        """See `WeightSync.deliver`."""

    def verify(self, engines: Sequence[ServerEngine], snapshot: Snapshot, version: int) -> list[Proof]:
        """See `WeightSync.verify`. All servers are asked at the same time; the policy then scores what one after the
        other has sampled.
        """
        prompts, is_tagged = probe_prompts(snapshot.policy), self.is_tagged
        answers = at_once(lambda engine: ask(engine, prompts, is_tagged=is_tagged), engines)
        settings: dict[str, Any] = {"version": version, "tolerance_nats": self.tolerance_nats, "is_tagged": is_tagged}
        return [compare(snapshot, engine, answer, **settings) for engine, answer in zip(engines, answers, strict=True)]

    def check_served(self, engine: ServerEngine, version: int) -> None:
        """See `WeightSync.check_served`."""
        url, found, pushed = engine.server.base_url, engine.control.served_tag(), weights_tag(version)
        if found is None:
            raise EngineDied(f"{url}: {STARTED_ANEW}")
        if found != pushed:
            raise foreign_write(url, f"has {f'version {found}' if found else 'others'}, where {pushed} was pushed")


def foreign_write(url: str, found: str) -> EngineError:
    """The error about a server whose weights something else than this run has changed."""
    return EngineError(
        f"{url}: somebody else has loaded weights into the server: it {found}. Nothing was learnt from its samples; give each run a "
        "server of its own (generation.base_url=null starts one that obeys nobody else), and resume with resume=auto"
    )


@dataclass(kw_only=True)
class PausingSync(ServerSync):
    """A strategy that stops the server's sampling while weights change.

    Args:
        pause_mode: what happens to requests in flight during a push: "keep" goes on with them under the new
            weights, their KV cache computed again; "wait" lets them end first; "abort" ends them, and the client sends
            them again.
    """

    pause_mode: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pause_mode not in PAUSE_MODES:
            raise ConfigError(f"weight_sync.pause_mode={self.pause_mode}: must be one of {', '.join(PAUSE_MODES)}")

    @property
    def requires(self) -> SyncRequirements:
        """See `WeightSync.requires`."""
        return replace(super().requires, in_flight=(self.pause_mode,))

    def check_replaced(self, engine: ServerEngine, staged: Staged) -> Callable[[], None] | None:
        """For a pause: has the engine what the requests that are under way were sampled from? The push overwrites what
        others loaded.
        """
        if engine not in staged.replaces:
            return None

        def check() -> None:
            if engine.control.served_tag() != weights_tag(
                staged.version
            ):  # else the push begins anew, because another engine has died
                self.check_served(engine, staged.replaces[engine])

        return check
