"""What weight sync may do to a running SGLang server: make it load weights from a folder, and keep our version with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from offline_grpo.engine.server import Server, stamp
from offline_grpo.errors import ConfigError

IDLE_TIMEOUT_S = 60.0
"""From the end of the last request until the scheduler has put its batch away."""
NEVER_TOLD = "default"
OLDEST, NEWEST = (0, 5, 11), (0, 5, 15)


@dataclass
class SglangControl:
    """Made from SGLang's source, run against 0.5.15. Every call raises EngineError, or EngineDied where our own server has ended."""

    server: Server

    def check_version(self) -> str:
        """The server's version.

        Raises:
            ConfigError: one that this was not made for, or a server whose samples do not depend on the seeds of requests.
        """
        about = self._get("/server_info")
        version = str(about["version"])
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2]), int(numbers[3])) <= NEWEST:
            raise ConfigError(
                f"{self.server.base_url}: SGLang {version} answers there, and versions {_text(OLDEST)} to {_text(NEWEST)} are supported; "
                f"see {self.server.version_key}"
            )
        if not about["enable_deterministic_inference"]:
            raise ConfigError(
                f"engine.args.enable_deterministic_inference=false: the SGLang server at {self.server.base_url} ignores seeds; set it to "
                "true, or start that server with --enable-deterministic-inference"
            )
        return version

    def load_weights(self, folder: str, *, version: int, pause_mode: str) -> None:
        """Load the weights of a folder in place of those being served; nothing is generated meanwhile, and caches are cleared.

        The steps are those that cannot end the server: it stops with an error when it loads weights and still has a request, or what the
        last one left behind. After an error it stays paused: it must not serve half-loaded weights.
        """
        assert pause_mode == "abort", pause_mode  # `Reload.check` has refused the others
        self._post("/pause_generation", {"mode": "abort"}, timeout_s=3600)
        self._post("/flush_cache", params={"timeout": IDLE_TIMEOUT_S}, timeout_s=IDLE_TIMEOUT_S + 10)
        self._post("/update_weights_from_disk", {"model_path": folder, "weight_version": stamp(version)}, timeout_s=3600)
        self._post("/continue_generation", {})

    def set_version(self, version: int) -> None:
        """Note the version of the weights that the server was started with."""
        self._post("/update_weight_version", {"new_version": stamp(version), "abort_all_requests": False})

    def served_stamp(self) -> str | None:
        """What `load_weights` or `set_version` noted last, and whoever else did; None if nobody has since the server was started."""
        found = str(self._get("/model_info")["weight_version"])
        return None if found == NEVER_TOLD else found

    def _get(self, path: str) -> Any:
        return self.server.watched(lambda: self.server.api.get(path))

    def _post(self, path: str, body: Any = None, **arguments: Any) -> Any:
        return self.server.watched(lambda: self.server.api.post(path, body, **arguments))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
