"""What samples, and what weight sync may do to it: an engine is a component of the group `generation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from offline_grpo.types import CompletionStream, SamplingParams, SamplingRequest, ServedWeights

E = TypeVar("E", bound="Engine")


@dataclass(frozen=True)
class ServedBits:
    """A server's fingerprints of the checkpoint's parameters; none of those that are quantised or in parts."""

    dtype: str
    fingerprints: dict[str, str]


class Engine(ABC):
    """A `RolloutClient` with the life of what it asks. Inherit from `LocalEngine`, or from `ServerEngine`.

    Attributes:
        name: of its kind, for messages.
        tells_alternatives: its completions have them where `SamplingParams.needs_alternatives` asks for it.
        tells_routes: the same for `SamplingParams.needs_routes`.
        shows_pictures: it takes requests with pictures.
        pause_modes: what can become of requests in flight while weights are loaded (`weight_sync.pause_mode`).
        gpus: that a server which the run starts may see; None: all, or none.
        is_managed: the run starts a server for it, so can restart it.
        has_lost_weights: whether it has ended, or was started anew by somebody since the last push.
    """

    name: ClassVar[str]
    is_local: ClassVar[bool]
    tells_alternatives: ClassVar[bool] = False
    tells_routes: ClassVar[bool] = False
    shows_pictures: ClassVar[bool] = False
    pause_modes: ClassVar[tuple[str, ...]] = ()
    weights: ServedWeights
    gpus: Sequence[int] | None = None
    is_managed: bool = False
    has_lost_weights: bool = False

    @abstractmethod
    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """See `RolloutClient.generate`."""

    def close(self) -> None:  # noqa: B027 - not every engine has connections
        """See `RolloutClient.close`."""

    def begin(self, model: str, args: Mapping[str, object]) -> None:  # noqa: B027 - as below
        """Start, and do not wait. Does nothing if it has begun already."""

    def start(self, model: str, args: Mapping[str, object]) -> None:  # noqa: B027 - nothing is started in this process
        """Start what samples with this model, and wait until it is ready. `args`: added to a server's command line for
        this start. Raises EngineError if it ended, was not ready in time, or is unreachable; ConfigError if its version
        is not supported, or its port is taken.
        """

    def stop(self) -> None:
        """Let go of everything, and stop what the run started. May be called again, also before `start`."""
        self.close()

    def check_alive(self) -> None:  # noqa: B027
        """Raise EngineDied if a server that the run started has ended."""

    def check_logprobs(self) -> None:  # noqa: B027
        """Raise ConfigError if it returns logprobs of another distribution than the run draws from."""


class LocalEngine(Engine):
    """Samples in this process, from the module that is trained. It has nothing to start or stop."""

    name: ClassVar[str] = "this process"
    is_local: ClassVar[bool] = True


def next_to_start(waiting: Iterable[E]) -> list[E]:
    """Engines whose servers can start in parallel: they share no GPU.

    A starting vLLM server measures its memory use, and counts what another one allocates meanwhile as its own.
    """
    taken: set[int] = set()
    chosen = []
    for engine in waiting:
        if not taken & {*(engine.gpus or ())}:
            chosen.append(engine)
            taken |= {*(engine.gpus or ())}
    return chosen
