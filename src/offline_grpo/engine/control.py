"""What weight sync may do to a running server, whatever its kind."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from offline_grpo.engine.http import Answer
from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError

Check = Callable[[], None] | None


@dataclass(frozen=True)
class ServedBits:
    """A server's fingerprints of the checkpoint's parameters; none where it holds parts of them, or quantised ones."""

    dtype: str
    fingerprints: dict[str, str]


@dataclass
class ServerControl(ABC):
    """Control over a server. Calls raise EngineError, or EngineDied if a server that the run started has ended."""

    server: Server

    name: ClassVar[str]
    oldest: ClassVar[tuple[int, ...]]
    newest: ClassVar[tuple[int, ...]]

    def get(self, path: str) -> Answer:
        """GET `path`, see `ServerApi.get`."""
        return self.server.watched(lambda: self.server.api.get(path))

    def post(self, path: str, body: Any = None, **arguments: Any) -> Answer:
        """POST `path`, see `ServerApi.post`."""
        return self.server.watched(lambda: self.server.api.post(path, body, **arguments))

    def check_version(self) -> str:
        """The server's version; raises ConfigError if it is not from `oldest` to `newest`."""
        version = self.version()
        numbers = re.match(r"\.".join([r"(\d{1,9})"] * len(self.oldest)), version)
        if numbers is None or not self.oldest <= tuple(map(int, numbers.groups())) <= self.newest:
            oldest, newest = (".".join(map(str, limit)) for limit in (self.oldest, self.newest))
            raise ConfigError(
                f"{self.server.base_url}: {self.name} {version[:40]} answers there, and versions {oldest} to {newest} "
                f"are supported; see {self.server.version_key}"
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
    def load_weights(self, folder: str, *, tag: str, pause_mode: str, check: Check = None) -> None:
        """Load the weights of a folder in place of those being served, and note their tag. The server is paused
        meanwhile. After an error it stays paused: it must not serve half-written weights.

        Args:
            check: called before the weights are loaded. If it raises, the server continues as it was.
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

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        """Of parameters with other fingerprints, those that do not just have the same numbers in another order, as some
        architectures are served.

        Args:
            sums: see `offline_grpo_fingerprint.sums`.
        """
        return list(sums)
