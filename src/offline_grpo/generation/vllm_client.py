"""Samples from a vLLM server through its completions endpoint, which takes and returns token ids in every version."""

from __future__ import annotations

from typing import Any, ClassVar

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm_control import VllmControl
from offline_grpo.generation.server_client import Choice, ServerClient
from offline_grpo.types import SamplingParams, SamplingRequest, ServedWeights


class VllmClient(ServerClient):
    """See `ServerClient`."""

    engine_name: ClassVar[str | None] = "vLLM"
    path = "/v1/completions"

    @staticmethod
    def control(server: Server) -> VllmControl:
        """See `ServerClient.control`."""
        return VllmControl(server)

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """See `ServerClient.body`. vLLM draws completion j of a request with its seed + j, and refuses n > 1 at temperature 0."""
        is_repeated = sampling.temperature == 0 and request.num_completions > 1
        prompt = list(request.prompt_ids)
        return {
            "model": weights.name or None,  # None is the base model
            "prompt": [prompt] * request.num_completions if is_repeated else prompt,
            "n": 1 if is_repeated else request.num_completions,
            "seed": request.seed,
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

    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        """See `ServerClient.choices`."""
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(len(choices))):
            raise ValueError("choices are not numbered from 0")
        if choices and choices[0]["prompt_token_ids"] != list(request.prompt_ids):
            raise ValueError("the prompt came back changed")
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]) for choice in choices]
