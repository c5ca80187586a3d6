"""SGLang, 0.5.11 to 0.5.15: how a server is started, how it is asked, and how weight sync controls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from offline_grpo.engine.http import read
from offline_grpo.engine.server_engine import Choice, Launcher, ServerEngine, flags
from offline_grpo.errors import require
from offline_grpo.types import SamplingParams, SamplingRequest, ServedWeights

IDLE_TIMEOUT_S = 60.0  # from the end of the last request until the scheduler has put its batch away
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

    def command(self, model: str, port: int, args: Mapping[str, object]) -> list[str]:
        """The module is started, not the `sglang` script: an interpreter is all it needs."""
        settings = {"host": self.host, "port": port, **self.args, **args}
        return [self.python or sys.executable, "-m", "sglang.launch_server", "--model-path", model, *flags(settings)]

    def key_args(self, folder: Path) -> list[str]:
        """The server takes its key as an option alone."""
        if self.api_key is None:
            return []
        file = folder / "key.yaml"
        file.write_text(json.dumps({"api-key": self.api_key}))
        return ["--config", str(file)]


class SglangEngine(ServerEngine):
    """An SGLang server. Made from the source of SGLang 0.5.11 to 0.5.15, and run against 0.5.15.

    Seeds act under `--enable-deterministic-inference` alone, and its `n` would draw all completions of a prompt with
    one seed. So a request is a batch: the prompt once per completion, each with sampling parameters of its own.

    Logprobs are those of softmax(logits / temperature), with a repetition penalty in the logits, unless
    SGLANG_RETURN_ORIGINAL_LOGPROB is set in the server's environment. SGLang does not renormalise them over what
    `top_p` and `top_k` leave. Its repetition penalty is for tokens of the completion alone, and its overlapping
    scheduler applies it late.
    """

    name: ClassVar[str] = "SGLang"
    path = "/generate"
    oldest, newest = (0, 5, 11), (0, 5, 15)

    @classmethod
    def start_words(cls, model: str, args: Mapping[str, object], server_args: Mapping[str, Any]) -> list[str]:
        return ["sglang.launch_server", "--model-path", model, *flags(args), "--enable-deterministic-inference"]

    def version(self) -> str:
        return read(self.get("/server_info"), lambda answer: answer["version"])

    def lacks(self, moves: str) -> str | None:
        """Weights can be loaded into every SGLang server."""
        is_seeded = self.get("/server_info").json()["enable_deterministic_inference"]
        return None if is_seeded is True else "ignores the seeds of requests (--enable-deterministic-inference)"

    def load_weights(self, folder: str, *, tag: str, pause_mode: str) -> None:
        """Caches are cleared too.

        The steps are those that cannot end the server: it stops with an error when it loads weights and still has a
        request, or what the last one left behind.
        """
        assert pause_mode in self.pause_modes, pause_mode
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

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """SGLang keeps seeds in 64 bits with a sign, so the last one is followed by 0."""
        common = {"max_new_tokens": sampling.max_new_tokens, **self.sampler_settings(sampling)}
        return {
            "input_ids": [list(request.prompt_ids)] * request.num_completions,
            "sampling_params": [
                {**common, "sampling_seed": (request.seed + j) % 2**63} for j in range(request.num_completions)
            ],
            "return_logprob": True,
        }

    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        """The answers of a batch come in its order."""
        found, prompt_length = [], len(request.prompt_ids)
        for meta in (item["meta_info"] for item in answer):
            reason = meta["finish_reason"]["type"]
            if reason != "abort" and meta["prompt_tokens"] != prompt_length:  # an aborted one may be unread
                raise ValueError(f"the prompt had {prompt_length} tokens and the server read {meta['prompt_tokens']}")
            tokens = meta["output_token_logprobs"]  # (logprob, token id, text or None) each
            if meta["completion_tokens"] != len(tokens):
                raise ValueError(f"{len(tokens)} logprobs for {meta['completion_tokens']} tokens")
            found.append(Choice([token[1] for token in tokens], [token[0] for token in tokens], reason))
        return found
