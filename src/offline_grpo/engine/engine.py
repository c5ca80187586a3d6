"""What samples: this process, or a server with its client and control."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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

    @staticmethod
    def control(server: Server) -> ServerControl:
        """Control over a server of this kind, as it is now: a new one after each start."""
        ...

    def generate_now(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """The completions of a few requests, in their order, which do not wait behind those of `generate`."""
        ...


class Engine:
    """An engine in this process: `client` samples from the trained module, and there is nothing to start or stop.

    Args:
        sampling: the run's settings; a proof of the weights uses the same.
    """

    gpus: Sequence[int] | None = None
    """Those that a server which the run starts may see; None: all, or none."""
    found_at: str | None = None
    """The URL of a server that the run does not start; None where it starts one, or needs none."""
    has_lost_weights = False
    """Whether a server that the run started has ended, or a server that was found was started anew since its weights
    were tagged."""

    def __init__(self, client: RolloutClient, sampling: SamplingParams) -> None:
        self.client = client
        self.sampling = sampling

    def begin(self, model: str, args: Mapping[str, Any]) -> None:
        """See `Server.begin`."""

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        """See `Server.start`; also raises ConfigError for a server of a version that is not supported."""

    def stop(self) -> None:
        """Close the client's connections, and stop a server of our own. May be called again, also before `start`."""

    def check_alive(self) -> None:
        """See `Server.check_alive`."""


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
        self.server.begin(model, args=args)

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        self.control = self.client.control(self.server)
        self.server.start(model, args=args)
        version = self.control.check_version()
        log.info("connected to %s %s at %s", self.client.engine_name, version, self.server.base_url)

    def follow(self, base_url: str, pid: int | None) -> None:
        """Ask and watch the server that another process of the run has started. In a Ray cluster it may have moved."""
        if base_url != self.server.base_url:
            self.client.close()
            self.server.move_to(base_url)
        self.server.watch(pid)

    def stop(self) -> None:
        self.client.close()
        self.server.stop()

    def check_alive(self) -> None:
        self.server.check_alive()

    @property
    def gpus(self) -> Sequence[int] | None:  # type: ignore[override]
        return self.server.gpus

    @property
    def found_at(self) -> str | None:  # type: ignore[override]
        return None if self.server.is_managed else self.server.base_url

    @property
    def has_lost_weights(self) -> bool:  # type: ignore[override]
        if self.server.is_managed:
            return self.server.has_ended
        try:
            return self.control.served_tag() is None
        except Refused:  # it notes no tags, because it takes adapters alone: these are loaded anew whatever it has
            return False


def engine_of(client: Any, sampling: SamplingParams) -> Engine:
    """The engine behind a client: a server if the client's class names one (`engine_name`), else this process."""
    return Engine(client, sampling) if client.engine_name is None else ServerEngine(client, sampling)
