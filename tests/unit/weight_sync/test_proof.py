"""What a probe asks for, and what it compares the server's logprobs with, which is worked out again here in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from factories import make_policy, make_qwen2

from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.model.policy import Policy
from offline_grpo.types import Completion, FinishReason, Rollout, SamplingParams, SamplingRequest, Score
from offline_grpo.weight_sync.proof import (
    PROBE_TOKENS,
    filtered_logprobs,
    probe_difference,
    probe_prompts,
    sample_probe,
)

PROMPT = (5, 6, 7, 5)
SAMPLED = (9, 30, 9, 2)
SETTINGS = [
    SamplingParams(4, temperature=0.7, top_k=7),
    SamplingParams(4, top_p=0.4),
    SamplingParams(4, temperature=1.6, top_p=0.6, top_k=20, repetition_penalty=1.7),
    SamplingParams(4, repetition_penalty=0.6),
]


@pytest.fixture
def policy() -> Policy:
    return make_policy(make_qwen2(vocab_size=40), build_char_tokenizer(64))


def by_hand(policy: Policy, prompt: tuple[int, ...], sampled: tuple[int, ...], sampling: SamplingParams) -> list[float]:
    """Logprobs of `sampled`: penalty, temperature, the top_k most probable, of those the fewest that make up top_p, and
    the token.
    """
    with torch.no_grad():
        logits = policy.causal_lm(torch.tensor([[*prompt, *sampled]])).logits[0].double().numpy()
    found = []
    for step, token in enumerate(sampled):
        z = logits[len(prompt) + step - 1].copy()
        for seen in {*prompt, *sampled[:step]}:
            z[seen] *= sampling.repetition_penalty if z[seen] < 0 else 1 / sampling.repetition_penalty
        z /= sampling.temperature
        best = list(np.argsort(-z))[: sampling.top_k or None]
        weights = np.exp(z[best]) / np.exp(z[best]).sum()
        kept = [
            place for place, before in zip(best, np.cumsum(weights) - weights, strict=True) if before < sampling.top_p
        ]
        found.append(z[token] - np.log(np.exp(z[list({*kept, token})]).sum()))
    return found


def rollout_of(prompt: Iterable[int], sampled: tuple[int, ...], logprobs: Iterable[float]) -> Rollout:
    completion = Completion(sampled, tuple(logprobs), FinishReason.LENGTH, (0,) * len(sampled))
    return Rollout.of_one_turn(tuple(prompt), completion, temperature=1.0, text="", score=Score(0.0, False, {}))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_logprobs_after_filters(sampling: SamplingParams, policy: Policy) -> None:
    expected = by_hand(policy, PROMPT, SAMPLED, sampling)
    found = filtered_logprobs(policy, rollout_of(PROMPT, SAMPLED, [0.0] * 4), sampling)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def probe(policy: Policy, server: Any, sampling: SamplingParams) -> torch.Tensor:
    """Trainer - server, in nats, of each token."""
    return probe_difference(policy, *sample_probe(server, probe_prompts(policy), sampling))


class Processed:
    """A server whose logprobs are those of the filtered distribution, or of the whole one if they are `raw`."""

    logprobs_are_filtered = VllmClient.logprobs_are_filtered

    def __init__(self, policy: Policy, *, raw: bool = False) -> None:
        self.policy, self.raw = policy, raw
        self.asked: list[SamplingParams] = []

    def generate_now(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> list[list[Completion]]:
        self.asked.append(sampling)
        drawn_from = SamplingParams(4) if self.raw else sampling
        logprobs = [tuple(by_hand(self.policy, request.prompt_ids, SAMPLED, drawn_from)) for request in requests]
        return [[Completion(SAMPLED, each, FinishReason.LENGTH, (0,) * 4)] for each in logprobs]


class Unfiltered(Processed):
    """One that leaves filters out of its logprobs, as SGLang does."""

    logprobs_are_filtered = SglangClient.logprobs_are_filtered


@pytest.mark.parametrize(
    "sampling", [SamplingParams(500, stop=("x",)), SamplingParams(500, temperature=0.7), *SETTINGS]
)
def test_a_probe_asks_for_what_the_run_asks_for(sampling: SamplingParams, policy: Policy) -> None:
    server, raw = Processed(policy), Processed(policy, raw=True)
    assert probe(policy, server, sampling).abs().max() < 1e-5
    [asked] = server.asked
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    assert [getattr(asked, name) for name in names] == [getattr(sampling, name) for name in names]
    assert (asked.max_new_tokens, asked.stop) == (PROBE_TOKENS, ())
    is_changed = [getattr(sampling, name) for name in names] != [1.0, 1.0, 0, 1.0]
    assert (probe(policy, raw, sampling).abs().mean().item() > 1e-3) is is_changed


def test_filters_are_left_out_where_logprobs_do_not_show_them(policy: Policy) -> None:
    server = Unfiltered(policy)
    assert probe(policy, server, SamplingParams(4, temperature=0.7, top_k=3)).abs().max() < 1e-5
    assert server.asked == [SamplingParams(PROBE_TOKENS, temperature=0.7)]


def test_a_greedy_run_is_proven_at_temperature_1(policy: Policy) -> None:
    server = Processed(policy)
    assert probe(policy, server, SamplingParams(4, temperature=0.0, top_p=0.5)).abs().max() < 1e-5
    assert server.asked == [SamplingParams(PROBE_TOKENS)]
