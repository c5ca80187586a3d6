"""How a kind of server is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Launcher(Protocol):
    """How a kind of server is started: the component of the `engine` group."""

    name: str
    host: str
    port: int | None
    api_key: str | None
    start_timeout_s: float
    args: Mapping[str, Any]
    tells_of_memory: bool
    """Whether the server makes the file that its environment names OFFLINE_GRPO_HAS_MEMORY; see
    `Server.wait_for_memory`.
    """

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        """The command line that serves `model`, with a strategy's `args` on top of the configured ones."""
        ...

    def key_args(self, folder: Path) -> list[str]:
        """What the command line needs for a key that must not stand on it: other users can read that. May write to the
        private `folder`.
        """
        ...

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        """The environment of the command, with a strategy's `env` and the GPUs that it may see (None: those that we
        see).
        """
        ...

    def check_installed(self) -> None:
        """Raise ConfigError if the server's package is certainly missing."""
        ...
