"""What samples: this process, or a server with its client, and what weight sync may do to it, whatever its kind."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from offline_grpo.engine.http import Refused
from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError, require
from offline_grpo.types import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedBits:
    """A server's fingerprints of the checkpoint's parameters; none of those that are quantised or in parts."""

    dtype: str
    fingerprints: dict[str, str]


@dataclass
class ServerControl(ABC):
    """Control over a server. See `Server.watched` for what calls raise."""

    server: Server

    name: ClassVar[str]
    oldest: ClassVar[tuple[int, ...]]
    newest: ClassVar[tuple[int, ...]]

    def get(self, path: str) -> httpx.Response:
        """GET `path`, see `ServerApi.get`."""
        return self.server.watched(lambda: self.server.api.get(path), changes=False)

    def post(self, path: str, body: Any = None, *, changes: bool = True, **arguments: Any) -> httpx.Response:
        """POST `path`, see `ServerApi.post`. `changes`: it does more than to read."""
        return self.server.watched(lambda: self.server.api.post(path, body, **arguments), changes=changes)

    def check_version(self) -> str:
        """The server's version; raises ConfigError if it is not from `oldest` to `newest`."""
        version = self.version()
        numbers = re.match(r"\.".join([r"(\d{1,9})"] * len(self.oldest)), version)
        if numbers is None or not self.oldest <= tuple(map(int, numbers.groups())) <= self.newest:
            oldest, newest = (".".join(map(str, limit)) for limit in (self.oldest, self.newest))
            key = "engine.python" if self.server.is_managed else self.server.key
            raise ConfigError(
                f"{self.server.base_url}: {self.name} {version[:40]} answers there, and versions {oldest} to {newest} "
                f"are supported; see {key}"
            )
        return version

    @abstractmethod
    def version(self) -> str:
        """The server's version."""

    @abstractmethod
    def lacks(self, moves: str) -> str | None:
        """What this already running server lacks for the run, as a phrase for the error message; None if nothing.

        Args:
            moves: what weight sync brings, see `SyncRequirements`.
        """

    @abstractmethod
    def load_weights(self, folder: str, *, tag: str, pause_mode: str) -> None:
        """Load the weights of a folder in place of those being served, and note their tag. The server is paused
        meanwhile. After an error it stays paused: it must not serve half-written weights.
        """

    @abstractmethod
    def set_tag(self, tag: str) -> None:
        """Note which weights are being served, once everything written so far has arrived."""

    @abstractmethod
    def served_tag(self) -> str | None:
        """The tag that was noted last; None since the server's start, "" if weights were loaded without a tag."""

    def served_bits(self) -> ServedBits | None:
        """Fingerprints of the weights being served; None from a kind of server that cannot compute them."""
        return None

    def logprobs_mode(self) -> str | None:
        """Of which distribution vLLM returns logprobs; None from a server that does not say so."""
        return None

    def quantization(self) -> str | None:
        """In which format a vLLM server computes with the weights that it gets, such as fp8; None for their own."""
        return None

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        """Of parameters with other fingerprints, those that do not just have the same numbers in another order, as some
        architectures are served.

        Args:
            sums: see `offline_grpo_fingerprint.sums`.
        """
        return list(sums)


class Engine:
    """What samples: a client, and the server that it asks. One that samples in this process, from the trained module,
    has nothing to start or stop.

    Args:
        client: a `RolloutClient`; it asks a server if its class names one (`engine_name`).
        sampling: the run's settings; a proof of the weights uses the same temperature.
        is_corrected: what it samples may have other probabilities than the trainer's.

    Attributes:
        server: None in this process.
        control: a `ServerControl`; a strategy for one kind of server may use all that this kind's control can do.
    """

    server: Any
    control: Any

    def __init__(self, client: Any, sampling: SamplingParams, *, is_corrected: bool = True) -> None:
        self.client = client
        self.sampling = sampling
        self.is_corrected = is_corrected
        self.server = None if client.engine_name is None else client.server
        self.control = None if self.server is None else client.control(self.server)

    def begin(self, model: str, args: Mapping[str, Any]) -> None:
        if self.server is not None:
            self.server.begin(model, args=args)

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        """See `Server.start`; also raises ConfigError for a server of a version that is not supported."""
        if self.server is not None:
            self.control = self.client.control(self.server)
            self.server.start(model, args=args)
            version = self.control.check_version()
            log.info("connected to %s %s at %s", self.client.engine_name, version, self.server.base_url)

    def check_logprobs(self) -> None:
        """Raise ConfigError for a server whose logprobs are not of the distribution that the run draws from, or, where
        nothing corrects for that, of quantised weights.
        """
        if self.server is None:
            return
        quantization = None if self.is_corrected else self.control.quantization()
        fix = f"{self.server.base_url} has {quantization} weights, so other probabilities; use token_truncate"
        require(quantization is None, "train.loss.importance_correction", "none", fix)
        if not self.sampling.is_filtered:
            return
        mode = self.control.logprobs_mode()
        fix = "top_p, top_k, min_p and penalties need processed_logprobs; start the server so"
        key = "engine.args.logprobs_mode" if self.server.is_managed else f"logprobs_mode of {self.server.key}"
        require(mode in (None, "processed_logprobs"), key, mode, fix)

    def follow(self, base_url: str, pid: int | None) -> None:
        """Ask and watch the server that another process of the run has started. In a Ray cluster it may have moved."""
        if base_url != self.server.base_url:
            self.client.close()
            self.server.move_to(base_url)
        self.server.watched_pid = pid

    def stop(self) -> None:
        """Close the client's connections, and stop a server of our own. May be called again, also before `start`."""
        if self.server is not None:
            self.client.close()
            self.server.stop()

    def check_alive(self) -> None:
        if self.server is not None:
            self.server.check_alive()

    @property
    def gpus(self) -> Sequence[int] | None:
        """Those that a server which the run starts may see; None: all, or none."""
        return None if self.server is None else self.server.gpus

    @property
    def found_at(self) -> str | None:
        """The URL of a server that the run does not start; None where it starts one, or needs none."""
        return None if self.server is None or self.server.is_managed else self.server.base_url

    @property
    def has_lost_weights(self) -> bool:
        """Whether a server that the run started has ended, or a server that was found was started anew since its
        weights were tagged.
        """
        if self.server is None or self.server.is_managed:
            return self.server is not None and self.server.has_ended
        try:
            return self.control.served_tag() is None
        except Refused:  # it notes no tags, because it takes adapters alone: these are loaded anew whatever it has
            return False
