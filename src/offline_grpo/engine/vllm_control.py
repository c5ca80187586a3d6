"""What weight sync may do to a running vLLM server: pause it, call its worker, flush its caches, swap its adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offline_grpo.engine.control import HttpControl, ServedBits
from offline_grpo.errors import EngineError


@dataclass
class VllmControl(HttpControl):
    """A `ServerControl` of vLLM. See `HttpControl`."""

    is_paused: bool = False

    name = "vLLM"
    oldest, newest = (0, 25), (0, 32)

    def check_version(self) -> str:
        """See `ServerControl.check_version`."""
        return self.check_range(str(self.get("/version")["version"]))

    def lacks(self, moves: str) -> str | None:
        """See `ServerControl.lacks`."""
        if moves == "lora" and not self.server.api.has("/v1/load_lora_adapter"):
            return "does not load adapters while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora)"
        if moves == "full" and not self.server.api.has("/collective_rpc"):
            return "has no endpoints for weights (VLLM_SERVER_DEV_MODE=1)"
        try:
            if moves == "full":
                self.served_tag()
        except EngineError as error:
            return f"has no worker extension (--worker-extension-cls; {error})"
        return None

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

    def load_weights(self, folder: str, *, tag: str, pause_mode: str) -> None:
        """See `ServerControl.load_weights`."""
        with self.paused(pause_mode):
            self.call_worker("reload_weights", weights_path=folder)
            self.reset_prefix_cache()
            self.set_tag(tag)

    def set_tag(self, tag: str) -> None:
        """See `ServerControl.set_tag`."""
        self.call_worker("grpo_set_tag", tag=tag)

    def served_tag(self) -> str | None:
        """See `ServerControl.served_tag`."""
        return self.call_worker("grpo_tag")

    def served_bits(self) -> ServedBits:
        """See `ServerControl.served_bits`."""
        return ServedBits(**self.call_worker("grpo_state"))

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter of a folder under a name that was never used before."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name; requests in flight finish with it."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})
