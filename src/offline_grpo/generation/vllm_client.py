"""Samples from a vLLM server through its completions endpoint, which takes and returns token ids in every version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offline_grpo.generation.server_client import Choice, ServerClient
from offline_grpo.types import SamplingParams


class VllmClient(ServerClient):
    """See `ServerClient`. `model_name` is the weights, or the adapter, that requests name."""

    engine_name = "vLLM"
    path = "/v1/completions"

    model_name = ""

    def request(self, prompt: Sequence[int], sampling: SamplingParams, *, group_size: int, seed: int) -> dict[str, Any]:
        """See `ServerClient.request`. vLLM draws completion j of a request with its seed + j, and refuses n > 1 at temperature 0."""
        is_repeated = sampling.temperature == 0 and group_size > 1
        return {
            "model": self.model_name or self.server.model_name,
            "prompt": [list(prompt)] * group_size if is_repeated else list(prompt),
            "n": 1 if is_repeated else group_size,
            "seed": seed,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": self._eos_ids,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def choices(self, body: Any, prompt: Sequence[int], group_size: int) -> list[Choice]:
        """See `ServerClient.choices`."""
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(len(choices))):
            raise ValueError("choices are not numbered from 0")
        if choices and choices[0]["prompt_token_ids"] != list(prompt):
            raise ValueError("the prompt came back changed")
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]) for choice in choices]
