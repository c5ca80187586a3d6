"""SGLang, 0.5.11 to 0.5.15: how a server is started, and how weight sync controls it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from offline_grpo.engine.engine import ServerControl
from offline_grpo.engine.http import read
from offline_grpo.engine.launcher import Launcher, flags
from offline_grpo.errors import require

IDLE_TIMEOUT_S = 60.0
"""From the end of the last request until the scheduler has put its batch away."""
LOAD_TIMEOUT_S = 3600.0
NO_TAG = "default"


@dataclass(frozen=True, kw_only=True)
class SglangLauncher(Launcher):
    """The command line and environment of an SGLang managed server. See `Launcher`."""

    name = "SGLang"
    package = "sglang"
    variables: ClassVar[Mapping[str, str]] = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # "1" gives logprobs from before the division by the temperature
        # "1": /health samples a token, and so fails while weights are loaded
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # these two keep a server that has failed from ending, for 5 to 65 s
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "PYTHONUNBUFFERED": "1",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        seeded, file = self.args.get("enable_deterministic_inference"), self.args.get("config")
        fix = "SGLang would ignore seeds; set it to true"
        require(bool(seeded), "engine.args.enable_deterministic_inference", seeded, fix)
        fix = "the run hands the server's key over in such a file; set the options themselves"
        require(file is None, "engine.args.config", file, fix)

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        """See `Launcher.command`. The module is started, not the `sglang` script: an interpreter is all it needs."""
        settings = {"host": self.host, "port": port, **self.args, **args}
        return [self.interpreter, "-m", "sglang.launch_server", "--model-path", model, *flags(settings)]

    def key_args(self, folder: Path) -> list[str]:
        """See `Launcher.key_args`. The server takes its key as an option alone."""
        if self.api_key is None:
            return []
        file = folder / "key.yaml"
        file.write_text(json.dumps({"api-key": self.api_key}))
        return ["--config", str(file)]


@dataclass
class SglangControl(ServerControl):
    """A `ServerControl` of SGLang, made from its source and run against 0.5.15."""

    name = "SGLang"
    oldest, newest = (0, 5, 11), (0, 5, 15)

    def version(self) -> str:
        return read(self.get("/server_info"), lambda answer: answer["version"])

    def lacks(self, moves: str) -> str | None:
        """See `ServerControl.lacks`. Weights can be loaded into every SGLang server."""
        is_seeded = self.get("/server_info").json()["enable_deterministic_inference"]
        return None if is_seeded is True else "ignores the seeds of requests (--enable-deterministic-inference)"

    def load_weights(self, folder: str, *, tag: str, pause_mode: str) -> None:
        """See `ServerControl.load_weights`; caches are cleared too.

        The steps are those that cannot end the server: it stops with an error when it loads weights and still has a
        request, or what the last one left behind.
        """
        assert pause_mode == "abort", pause_mode  # `Reload.requires` has ruled out the others
        self.post("/pause_generation", {"mode": "abort"}, timeout_s=LOAD_TIMEOUT_S)
        self.post("/flush_cache", params={"timeout": IDLE_TIMEOUT_S}, timeout_s=IDLE_TIMEOUT_S + 10)
        weights = {"model_path": folder, "weight_version": tag}
        self.post("/update_weights_from_disk", weights, timeout_s=LOAD_TIMEOUT_S)
        self.post("/continue_generation", {})

    def set_tag(self, tag: str) -> None:
        self.post("/update_weight_version", {"new_version": tag, "abort_all_requests": False})

    def served_tag(self) -> str | None:
        found = self.get("/model_info").json()["weight_version"]
        return None if found == NO_TAG else found
