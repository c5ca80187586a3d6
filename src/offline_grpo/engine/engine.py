"""What samples: an engine starts, stops and comes back. It is this process, or a server with its client and control."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from offline_grpo.engine.control import ServerControl
from offline_grpo.engine.http import Refused
from offline_grpo.engine.server import Server
from offline_grpo.interfaces import RolloutClient
from offline_grpo.types import Completion, SamplingParams, SamplingRequest

log = logging.getLogger(__name__)


class AsksServer(RolloutClient, Protocol):
    """A client with an `engine_name`: it asks a server, and knows how weight sync may control that server."""

    server: Server
    num_asked: Counter[str]
    logprobs_are_filtered: ClassVar[bool]

    @staticmethod
    def control(server: Server) -> ServerControl:
        """Control over a server of this kind, as it is now: a new one after each start."""
        ...

    def generate_now(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """The completions of a few requests, in their order. They are not to wait behind those of `generate`."""
        ...


class Engine:
    """An engine in this process: `client` samples from the trained module, and there is nothing to start or stop.

    Args:
        sampling: what the run asks of it; a proof of its weights asks for the same.
    """

    def __init__(self, client: RolloutClient, sampling: SamplingParams) -> None:
        self.client = client
        self.sampling = sampling

    def begin(self, model: str, args: Mapping[str, Any]) -> None:
        """Start a server of our own and go on: `start` with the same words waits for it. Raises what `start` does."""

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        """Start serving `model`, with `args` added to the command line; a server that was found must only be healthy.

        Raises:
            EngineError: it cannot be started or reached.
            ConfigError: an engine that a run cannot work with.
        """

    def stop(self) -> None:
        """Close the client's connections, and stop a server of our own. May be called again, also before `start`."""

    def check_alive(self) -> None:
        """Raise EngineDied if a server that the run started has ended."""

    @property
    def is_ready(self) -> bool:
        """Whether `start` need not wait for a server that `begin` started: it is healthy, has ended, or takes too long."""
        return True

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
        """Whether a server that the run started has ended, or a server that was found was started anew since its
        weights were tagged.
        """
        return False


class ServerEngine(Engine):
    """A server behind its client."""

    client: AsksServer  # type: ignore[assignment]  # narrower than the base's

    def __init__(self, client: AsksServer, sampling: SamplingParams) -> None:
        super().__init__(client, sampling)
        self.control: Any = client.control(client.server)
        """A `ServerControl`; a strategy for one kind of server may use all that this kind's control can do."""

    @property
    def server(self) -> Server:
        return self.client.server

    def begin(self, model: str, args: Mapping[str, Any]) -> None:
        """See `Engine.begin`."""
        self.server.begin(model, args=args)

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        """See `Engine.start`."""
        self.control = self.client.control(self.server)
        self.server.start(model, args=args)
        version = self.control.check_version()
        log.info("connected to %s %s at %s", self.client.engine_name, version, self.server.base_url)

    def follow(self, base_url: str, pid: int | None) -> None:
        """Ask the server that another process of the run has started, and watch it. In a Ray cluster it may have moved."""
        if base_url != self.server.base_url:
            self.client.close()
            self.server.move_to(base_url)
        self.server.watch(pid)

    def stop(self) -> None:
        """See `Engine.stop`."""
        self.client.close()
        self.server.stop()

    def check_alive(self) -> None:
        """See `Engine.check_alive`."""
        self.server.check_alive()

    @property
    def is_ready(self) -> bool:
        """See `Engine.is_ready`."""
        return self.server.is_ready

    @property
    def gpus(self) -> Sequence[int] | None:
        """See `Engine.gpus`."""
        return self.server.gpus

    @property
    def found_at(self) -> str | None:
        """See `Engine.found_at`."""
        return None if self.server.is_managed else self.server.base_url

    @property
    def has_lost_weights(self) -> bool:
        """See `Engine.has_lost_weights`."""
        if self.server.is_managed:
            return self.server.has_ended
        try:
            return self.control.served_tag() is None
        except Refused:  # it notes no tags, because it takes adapters alone: these are loaded anew whatever it has
            return False


def engine_of(client: Any, sampling: SamplingParams) -> Engine:
    """The engine behind a client: a server if the client's class names one (`engine_name`), else this process."""
    return Engine(client, sampling) if client.engine_name is None else ServerEngine(client, sampling)
