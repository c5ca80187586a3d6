"""Samples from a vLLM server: through the endpoint that every server of a run has, or the one of stock servers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, ClassVar

import httpx

from offline_grpo.engine.http import NotFound, Refused
from offline_grpo.engine.vllm import VllmControl
from offline_grpo.errors import EngineDied
from offline_grpo.generation.server_client import Choice, ServerClient
from offline_grpo.types import Completion, SamplingParams, SamplingRequest, ServedWeights

log = logging.getLogger(__name__)

TOKENS = "/generate_tokens"
"""Token ids in, token ids and logprobs out, and nothing else that takes time per token; see `engine/inside_vllm/`."""
STOCK = "/v1/completions"
"""Takes and returns token ids in every version, and makes text that nobody reads."""


class VllmClient(ServerClient):
    """See `ServerClient`. Asks a server that lacks `TOKENS` at `STOCK` from then on."""

    engine_name: ClassVar[str | None] = "vLLM"
    control = VllmControl
    path = TOKENS

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """See `ServerClient.body`. vLLM draws completion j of a request with its seed + j, and refuses n > 1 at
        temperature 0.
        """
        prompt = list(request.prompt_ids)
        stock = {"prompt": prompt, "logprobs": 0, "return_token_ids": True}  # logprobs of the sampled token alone
        own = {"prompt": {"prompt_token_ids": prompt}, "urgent": request.is_urgent}
        return {
            **(own if self.path == TOKENS else stock),
            "model": weights.name or None,  # None is the base model
            "n": 1 if sampling.temperature == 0 else request.num_completions,
            "seed": request.seed,
            "max_tokens": sampling.max_new_tokens,
            **self.sampler_settings(sampling),
        }

    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        choices = answer["choices"]
        if "prompt_token_ids" in answer:  # of `TOKENS`
            prompt_ids = answer["prompt_token_ids"]
            found = [(choice["token_ids"], choice["logprobs"], choice["finish_reason"]) for choice in choices]
        else:
            choices = sorted(choices, key=lambda choice: choice["index"])
            prompt_ids = choices[0]["prompt_token_ids"]
            found = [(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"]) for c in choices]
        if prompt_ids != list(request.prompt_ids):
            raise ValueError("the prompt came back changed")
        return found

    async def _complete(
        self, http: httpx.AsyncClient, request: SamplingRequest, sampling: SamplingParams
    ) -> list[Completion]:
        path = self.path
        try:
            return await super()._complete(http, request, sampling)
        except Refused as refusal:
            if self.weights.name:
                await asyncio.to_thread(self._check_adapter, self.weights.name)
            if path == STOCK or not isinstance(refusal, NotFound):
                raise
            if self.path == TOKENS:  # else another request was told so
                log.info("%s has no POST %s; it is asked at %s, slower", self.server.base_url, TOKENS, STOCK)
                self.path = STOCK
            return await super()._complete(http, request, sampling)

    def _check_adapter(self, name: str) -> None:
        """Raise EngineDied where the server does not have it."""
        if name not in VllmControl(self.server).adapters():
            why = "it was started anew, or it was told to unload it"
            raise EngineDied(f"{self.server.base_url}: the server has lost the adapter {name}: {why}.")

    def _completions(
        self, parsed: Any, request: SamplingRequest, sampling: SamplingParams, version: int
    ) -> list[Completion]:
        """Greedy completions of a prompt are all alike, so one is asked for."""
        if sampling.temperature > 0:
            return super()._completions(parsed, request, sampling, version)
        [one] = super()._completions(parsed, replace(request, num_completions=1), sampling, version)
        return [one] * request.num_completions
