"""What weight sync may do to a running vLLM server: pause it, call its worker, flush its caches, swap its adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offline_grpo.engine.server import Server, stamp
from offline_grpo.errors import ConfigError

OLDEST, NEWEST = (0, 25), (0, 32)


@dataclass
class VllmControl:
    """Control over HTTP. Every call raises EngineError, or EngineDied where our own server has ended."""

    server: Server
    is_paused: bool = False

    def check_version(self) -> str:
        """The server's version.

        Raises:
            ConfigError: one that this was not made for.
        """
        version = str(self._get("/version")["version"])
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
            raise ConfigError(
                f"{self.server.base_url}: vLLM {version} answers there, and versions 0.{OLDEST[1]} to 0.{NEWEST[1]} are supported; see "
                f"{self.server.version_key}"
            )
        return version

    def pause(self, mode: str) -> None:
        """Stop generating, and clear KV caches.

        Args:
            mode: what happens to requests in flight: "keep" goes on with them after `resume`, "wait" lets them end first, "abort" ends them
                with what they have.
        """
        if not self.is_paused:
            self.post("/pause", params={"mode": mode, "clear_cache": "true"}, timeout_s=3600)
            self.is_paused = True

    def resume(self) -> None:
        """Go on with what was kept and what has arrived since."""
        self.post("/resume")
        self.is_paused = False

    @contextmanager
    def paused(self, mode: str) -> Iterator[None]:
        """Paused inside, see `pause`. After an error the server stays paused: it must not serve half-written weights."""
        self.pause(mode)
        yield
        self.resume()

    def reset_prefix_cache(self) -> None:
        """Forget keys and values that other weights computed."""
        self.post("/reset_prefix_cache")

    def call_worker(self, method: str, *, timeout_s: float = 600.0, **kwargs: Any) -> Any:
        """What the worker's method returns; of several workers, the first one's."""
        body = {"method": method, "kwargs": kwargs, "timeout": timeout_s}
        return self.post("/collective_rpc", body, timeout_s=timeout_s + 10)["results"][0]

    def load_weights(self, folder: str, *, version: int, pause_mode: str) -> None:
        """Load the weights of a folder in place of those being served, and note their version. Paused meanwhile."""
        with self.paused(pause_mode):
            self.call_worker("reload_weights", weights_path=folder)
            self.reset_prefix_cache()
            self.set_version(version)

    def set_version(self, version: int) -> None:
        """Note the version of the weights that are being served, once everything written so far has arrived."""
        self.call_worker("grpo_set_stamp", stamp=stamp(version))

    def served_stamp(self) -> str | None:
        """What `set_version` noted last, and whoever else did; None if nobody has since the server was started."""
        return self.call_worker("grpo_stamp")

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter of a folder under a name that was never used before."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name; requests in flight finish with it."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def _get(self, path: str) -> Any:
        return self.server.watched(lambda: self.server.api.get(path))

    def post(self, path: str, body: Any = None, **arguments: Any) -> Any:
        """POST `path`, see `ServerApi.post`."""
        return self.server.watched(lambda: self.server.api.post(path, body, **arguments))
