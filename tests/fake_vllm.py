"""A stand-in for a vLLM server that a whole run can use: a transformers model, the real worker extension, and vLLM's
routes and forms.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from factories import complete_in_order
from inside_vllm import make_worker
from safetensors.torch import load_file
from scripted_server import Reply, Request
from transformers import AutoModelForCausalLM

from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.load import load_tokenizer
from offline_grpo.types import SamplingParams, SamplingRequest


class FakeVllm:
    """The script of a `ScriptedServer`. `close` lets go of the memory that it shares."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(str(folder))
        self.worker = make_worker(self.model)
        self._client = TransformersClient(self.model, load_tokenizer(str(folder)), 64)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Reply:
        if request.path == "/health":
            return Reply(b"", headers={})
        if request.path == "/version":
            return Reply({"version": "0.32.0"})
        if request.method == "GET":
            return Reply({"detail": "Method Not Allowed"}, status=405)
        with self._lock:
            if request.path == "/generate_tokens":
                return Reply(self._complete(request.body))
            if request.path == "/collective_rpc":
                return Reply({"results": [self._call(request.body["method"], request.body["kwargs"])]})
        return Reply({"status": "done"})

    def close(self) -> None:
        for file in getattr(self.worker, "_grpo_files", []):
            os.close(file)

    def _call(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method == "reload_weights":
            for file in Path(kwargs["weights_path"]).glob("*.safetensors"):
                self.model.load_state_dict(load_file(file), strict=False)
            return None
        return getattr(self.worker, method)(**kwargs)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(body["max_tokens"], temperature=body["temperature"])
        prompt = body["prompt"]["prompt_token_ids"]
        completions = complete_in_order(
            self._client, [SamplingRequest(tuple(prompt), body["n"], body["seed"])], sampling
        )[0]
        choices = [
            {
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "finish_reason": str(completion.finish_reason),
            }
            for completion in completions
        ]
        return {"prompt_token_ids": prompt, "choices": choices}
