"""What weight sync may do to a running vLLM server: pause it, call its worker, flush its caches, swap its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offline_grpo.engine.control import Check, HttpControl, ServedBits
from offline_grpo.engine.http import Refused, text_of


@dataclass
class VllmControl(HttpControl):
    """A `ServerControl` of vLLM. See `HttpControl`."""

    is_paused: bool = False

    name = "vLLM"
    oldest, newest = (0, 25), (0, 32)

    def check_version(self) -> str:
        """See `ServerControl.check_version`."""
        return self.check_range(self.get("/version").read(lambda answer: text_of(answer["version"])))

    def lacks(self, moves: str) -> str | None:
        """See `ServerControl.lacks`."""
        if moves == "lora" and not self.server.api.has("/v1/load_lora_adapter"):
            return "does not load adapters while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora)"
        if moves == "full" and not self.server.api.has("/collective_rpc"):
            return "has no endpoints for weights (VLLM_SERVER_DEV_MODE=1)"
        try:
            if moves == "full":
                self.served_tag()
        except Refused as error:
            return f"has no worker extension (--worker-extension-cls; {error})"
        return None

    def pause(self, mode: str, check: Check = None) -> None:
        """Stop generating, and clear KV caches.

        Args:
            mode: what happens to requests in flight: "keep" goes on with them after `resume`, "wait" lets them end
                first, "abort" ends them with what they have.
            check: see `ServerControl.load_weights`. A server that a failed push has left paused was checked by that
                one.
        """
        if self.is_paused:
            return
        timeout_s = 3600 if mode == "wait" else None
        self.post("/pause", params={"mode": mode, "clear_cache": "true"}, timeout_s=timeout_s)
        self.is_paused = True
        try:
            if check is not None:
                check()
        except BaseException:
            self.resume()
            raise

    def pause_again(self, mode: str) -> None:
        """Like `pause`, for a server that was paused and that somebody else may have resumed."""
        self.is_paused = False
        self.pause(mode)

    def resume(self) -> None:
        """Go on with what was kept and what has arrived since."""
        self.post("/resume")
        self.is_paused = False

    def reset_prefix_cache(self) -> None:
        """Forget keys and values that other weights computed."""
        self.post("/reset_prefix_cache")

    def call_worker(
        self,
        method: str,
        *,
        read: Callable[[Any], Any] = lambda result: result,
        timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> Any:
        """What the worker's method returns, as `read` understands it (see `Answer.read`); of several workers, the first
        one's.
        """
        body = {"method": method, "kwargs": kwargs, "timeout": timeout_s}
        return self.post("/collective_rpc", body, timeout_s=timeout_s + 10).read(
            lambda answer: read(answer["results"][0])
        )

    def load_weights(self, folder: str, *, tag: str, pause_mode: str, check: Check = None) -> None:
        """See `ServerControl.load_weights`. After an error the server stays paused: it must not serve half-written
        weights.
        """
        self.pause(pause_mode, check)
        self.call_worker("reload_weights", weights_path=folder)
        self.reset_prefix_cache()
        self.set_tag(tag)
        self.resume()

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        """See `ServerControl.other_numbers`."""
        if not sums:
            return []
        found = self.call_worker(
            "grpo_sums", names=list(sums), read=lambda answer: {name: text_of(answer[name]) for name in sums}
        )
        return [name for name, own in sums.items() if found[name] != own]

    def set_tag(self, tag: str) -> None:
        """See `ServerControl.set_tag`."""
        self.call_worker("grpo_set_tag", tag=tag)

    def served_tag(self) -> str | None:
        """See `ServerControl.served_tag`."""
        return self.call_worker("grpo_tag", read=lambda tag: None if tag is None else text_of(tag))

    def served_bits(self) -> ServedBits:
        """See `ServerControl.served_bits`."""
        return self.call_worker(
            "grpo_state", read=lambda state: ServedBits(text_of(state["dtype"]), {**state["fingerprints"]})
        )

    def describe(self) -> dict[str, Any]:
        """Who and what the worker is: pid, device, gpu_uuid (None on CPUs), and refusals, why its weights cannot be
        shared.
        """
        return self.call_worker("grpo_describe", read=_description)

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter of a folder under a name that was never used before."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def adapters(self) -> set[str]:
        """The names of those that it serves, and of the base model."""
        return self.get("/v1/models").read(lambda answer: {text_of(model["id"]) for model in answer["data"]})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name; requests in flight finish with it."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})


def _description(answer: Any) -> dict[str, Any]:
    uuid = answer["gpu_uuid"]
    return {
        "pid": int(answer["pid"]),
        "device": text_of(answer["device"]),
        "gpu_uuid": None if uuid is None else text_of(uuid),
        "refusals": [text_of(reason) for reason in answer["refusals"]],
    }
