"""What a probe asks for, and what it compares the server's logprobs with, which is worked out again here in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from factories import make_policy, make_qwen2

from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import Completion, FinishReason, SamplingParams, SamplingRequest
from offline_grpo.weight_sync.proof import PROBE_TOKENS, probe_difference, probe_prompts, sample_probe

SAMPLED = (9, 30, 9, 2)


class Answering:
    """A server that returns logprobs of `temperature`, or of the requests' where that is None."""

    def __init__(self, policy: Policy, temperature: float | None = None) -> None:
        self.policy, self.temperature = policy, temperature
        self.asked: list[SamplingParams] = []

    def generate_now(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> list[list[Completion]]:
        self.asked.append(sampling)
        return [[self._complete(request.prompt_ids, self.temperature or sampling.temperature)] for request in requests]

    @torch.no_grad()
    def _complete(self, prompt: tuple[int, ...], temperature: float) -> Completion:
        z = self.policy.causal_lm(torch.tensor([[*prompt, *SAMPLED]])).logits[0].double().numpy() / temperature
        rows = z[len(prompt) - 1 : -1]
        logprobs = [
            row[token] - torch.tensor(row).logsumexp(0).item() for row, token in zip(rows, SAMPLED, strict=True)
        ]
        return Completion(SAMPLED, tuple(logprobs), FinishReason.LENGTH, (0,) * 4)


@pytest.mark.parametrize(("temperature", "asked"), [(1.0, 1.0), (0.7, 0.7), (0.0, 1.0)])
def test_a_probe_compares_at_the_temperature_of_the_run(temperature: float, asked: float) -> None:
    """Greedy completions have the logprobs of temperature 1."""
    policy = make_policy(make_qwen2(vocab_size=40), build_char_tokenizer(64))

    def probe(server: Any) -> torch.Tensor:
        return probe_difference(policy, sample_probe(server, probe_prompts(policy), temperature))

    server = Answering(policy)
    assert probe(server).abs().max() < 1e-5
    assert server.asked == [SamplingParams(PROBE_TOKENS, temperature=asked)]
    assert probe(Answering(policy, temperature=2.0)).abs().mean() > 1e-3
