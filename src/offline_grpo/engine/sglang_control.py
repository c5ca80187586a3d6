"""What weight sync may do to a running SGLang server: make it load weights from a folder, and keep our tag with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offline_grpo.engine.control import Check, HttpControl
from offline_grpo.engine.http import text_of

IDLE_TIMEOUT_S = 60.0
"""From the end of the last request until the scheduler has put its batch away."""
NEVER_TOLD = "default"


@dataclass
class SglangControl(HttpControl):
    """A `ServerControl` of SGLang, made from its source and run against 0.5.15. See `HttpControl`."""

    name = "SGLang"
    oldest, newest = (0, 5, 11), (0, 5, 15)

    def check_version(self) -> str:
        """See `ServerControl.check_version`."""
        return self.check_range(self.get("/server_info").read(lambda answer: text_of(answer["version"])))

    def lacks(self, moves: str) -> str | None:
        """See `ServerControl.lacks`. Weights can be loaded into every SGLang server."""
        is_seeded = self.get("/server_info").read(lambda answer: answer["enable_deterministic_inference"])
        return None if is_seeded is True else "ignores the seeds of requests (--enable-deterministic-inference)"

    def load_weights(self, folder: str, *, tag: str, pause_mode: str, check: Check = None) -> None:
        """See `ServerControl.load_weights`; caches are cleared too.

        The steps are those that cannot end the server: it stops with an error when it loads weights and still has a
        request, or what the last one left behind. After an error it stays paused: it must not serve half-loaded
        weights.
        """
        assert pause_mode == "abort", pause_mode  # `Reload.requires` has ruled out the others
        self.post("/pause_generation", {"mode": "abort"}, timeout_s=3600)
        try:
            if check is not None:
                check()
        except BaseException:
            self.post("/continue_generation", {})
            raise
        self.post("/flush_cache", params={"timeout": IDLE_TIMEOUT_S}, timeout_s=IDLE_TIMEOUT_S + 10)
        self.post("/update_weights_from_disk", {"model_path": folder, "weight_version": tag}, timeout_s=3600)
        self.post("/continue_generation", {})

    def set_tag(self, tag: str) -> None:
        """See `ServerControl.set_tag`."""
        self.post("/update_weight_version", {"new_version": tag, "abort_all_requests": False})

    def served_tag(self) -> str | None:
        """See `ServerControl.served_tag`."""
        found = self.get("/model_info").read(lambda answer: text_of(answer["weight_version"]))
        return None if found == NEVER_TOLD else found

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        """See `ServerControl.other_numbers`. SGLang computes no sums."""
        return list(sums)

    def served_bits(self) -> None:
        """See `ServerControl.served_bits`. SGLang computes none."""
