"""Samples from an SGLang server through its native endpoint, which takes and returns token ids."""

from __future__ import annotations

from typing import Any, ClassVar

from offline_grpo.engine.sglang import SglangControl
from offline_grpo.generation.server_client import Choice, ServerClient
from offline_grpo.types import SamplingParams, SamplingRequest, ServedWeights


class SglangClient(ServerClient):
    """See `ServerClient`. Made from the source of SGLang 0.5.11 to 0.5.15, and run against 0.5.15.

    Seeds act under `--enable-deterministic-inference` alone, and its `n` would draw all completions of a prompt with
    one seed. So a request is a batch: the prompt once per completion, each with sampling parameters of its own.

    Logprobs are those of softmax(logits / temperature), with a repetition penalty in the logits, unless
    SGLANG_RETURN_ORIGINAL_LOGPROB is set in the server's environment. SGLang does not renormalise them over what
    `top_p` and `top_k` leave. Its repetition penalty is for tokens of the completion alone, and its overlapping
    scheduler applies it late.
    """

    engine_name: ClassVar[str | None] = "SGLang"
    control = SglangControl
    path = "/generate"

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """See `ServerClient.body`. SGLang keeps seeds in 64 bits with a sign, so the last one is followed by 0."""
        common = {
            "max_new_tokens": sampling.max_new_tokens,
            **self.sampler_settings(sampling),
        }
        return {
            "input_ids": [list(request.prompt_ids)] * request.num_completions,
            "sampling_params": [
                {**common, "sampling_seed": (request.seed + j) % 2**63} for j in range(request.num_completions)
            ],
            "return_logprob": True,
        }

    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        """See `ServerClient.choices`. The answers of a batch come in its order."""
        return [_choice(item["meta_info"], len(request.prompt_ids)) for item in answer]


def _choice(meta: Any, prompt_length: int) -> Choice:
    reason = meta["finish_reason"]["type"]
    if reason != "abort" and meta["prompt_tokens"] != prompt_length:  # an aborted one may be unread
        raise ValueError(f"the prompt had {prompt_length} tokens and the server read {meta['prompt_tokens']}")
    tokens = meta["output_token_logprobs"]  # (logprob, token id, text or None) each
    if meta["completion_tokens"] != len(tokens):
        raise ValueError(f"{len(tokens)} logprobs for {meta['completion_tokens']} tokens")
    return [token[1] for token in tokens], [token[0] for token in tokens], reason
