"""What samples, and what weight sync may do to it: an engine is a component of the group `generation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from offline_grpo.types import CompletionStream, SamplingParams, SamplingRequest, ServedWeights


@dataclass(frozen=True)
class ServedBits:
    """A server's fingerprints of the checkpoint's parameters; none of those that are quantised or in parts."""

    dtype: str
    fingerprints: dict[str, str]


class Engine(ABC):
    """A `RolloutClient` with the life of what it asks. Inherit from `LocalEngine`, or from `ServerEngine`.

    Attributes:
        name: of its kind, for messages.
        pause_modes: what can become of requests in flight while weights are loaded (`weight_sync.pause_mode`).
    """

    name: ClassVar[str]
    is_local: ClassVar[bool]
    pause_modes: ClassVar[tuple[str, ...]] = ()
    weights: ServedWeights

    @abstractmethod
    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """See `RolloutClient.generate`."""

    def close(self) -> None:  # noqa: B027 - not every engine has connections
        """See `RolloutClient.close`."""

    def begin(self, model: str, args: Mapping[str, object]) -> None:  # noqa: B027 - as below
        """Start, and do not wait. Does nothing if it has begun already."""

    def start(self, model: str, args: Mapping[str, object]) -> None:  # noqa: B027 - nothing is started in this process
        """Start what samples with this model, and wait until it is ready.

        Args:
            args: added to a server's command line for this start.

        Raises:
            EngineError: it ended, was not ready in time, or is unreachable.
            ConfigError: it is of a version that is not supported, or its port is taken.
        """

    def stop(self) -> None:
        """Let go of everything, and stop what the run started. May be called again, also before `start`."""
        self.close()

    def check_alive(self) -> None:  # noqa: B027
        """Raise EngineDied if a server that the run started has ended."""

    @property
    def gpus(self) -> Sequence[int] | None:
        """Those that a server which the run starts may see; None: all, or none."""
        return None

    @property
    def found_at(self) -> str | None:
        """The URL of a server that the run does not start; None where it starts one, or needs none."""
        return None

    @property
    def has_lost_weights(self) -> bool:
        """Whether it has ended, or was started anew by somebody since the last push."""
        return False

    def check_logprobs(self) -> None:  # noqa: B027
        """Raise ConfigError if it returns logprobs of another distribution than the run draws from."""


class LocalEngine(Engine):
    """Samples in this process, from the module that is trained. It has nothing to start or stop."""

    name: ClassVar[str] = "this process"
    is_local: ClassVar[bool] = True
