"""In-process sampling against an oracle: a forward pass over each whole sequence, no cache, no padding, no batch,
filters written out.
"""

from __future__ import annotations

import pytest
import torch
from factories import VOCAB, generate, make_llama, make_qwen2
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.types import Completion, SamplingParams

PROMPTS = [[5, 6, 7], [9], list(range(2, 27)), [3, 3, 4, 8], [11, 12, 13]]
SEEDS = [100, 200, 300, 400, 500]
EOS = [1, 2, 3]
MODELS = {"qwen2-tied": make_qwen2, "llama": make_llama}


class NoEos:
    """Stands in for a tokenizer where no text is involved."""

    eos_token_id = None


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = MODELS[request.param]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 0.5
    model.generation_config.eos_token_id = EOS
    return model


def sample(model: PreTrainedModel, sampling: SamplingParams, *, group_size: int, prompts=PROMPTS, batch_size: int = 64):
    client = TransformersClient(model, NoEos(), batch_size=batch_size)  # type: ignore[arg-type]
    return generate(client, prompts, sampling, group_size=group_size, seeds=SEEDS[: len(prompts)])


@torch.no_grad()
def next_logprobs(model: PreTrainedModel, sequence: list[int], sampling: SamplingParams, first: int = 0) -> Tensor:
    """Log-probabilities [N, V] of the tokens after `sequence[: first + 1]`, `sequence[: first + 2]` and so on, under
    the sampling distribution, float64.
    """
    logits = model(torch.tensor([sequence]), use_cache=False).logits[0].double()
    return torch.stack([filtered(logits[i], sequence[: i + 1], sampling) for i in range(first, len(sequence))])


def filtered(logits: Tensor, sequence: list[int], sampling: SamplingParams) -> Tensor:
    """Log-probabilities [V] after `sequence`, of the model's logits."""
    for token in set(sequence):
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits /= sampling.temperature
    logits[logits.softmax(-1) < sampling.min_p * logits.softmax(-1).max()] = -torch.inf
    ranked = logits.argsort(descending=True).tolist()
    if sampling.top_k:
        logits[ranked[sampling.top_k :]] = -torch.inf
    probs = logits.softmax(-1)
    mass = 0.0
    for token in ranked:
        if mass >= sampling.top_p:
            logits[token] = -torch.inf
        mass += probs[token].item()
    return logits.log_softmax(-1)


def check(model: PreTrainedModel, prompt: list[int], completion: Completion, sampling: SamplingParams) -> None:
    before = [*prompt, *completion.token_ids[:-1]]
    expected = next_logprobs(model, before, sampling, len(prompt) - 1)
    for token, logprob, own in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        assert logprob == pytest.approx(own[token].item(), abs=1e-5)
        if sampling.temperature == 0:
            assert token == own.argmax()
    if sampling.needs_alternatives:
        assert completion.alternatives is not None
        sets = [{token, *others} for token, others in zip(completion.token_ids, completion.alternatives, strict=True)]
        assert sets == [set(own.isfinite().nonzero().squeeze(-1).tolist()) for own in expected]
        assert sum(map(len, completion.alternatives)) == sum(map(len, sets)) - len(sets)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(10, temperature=1.3),
        SamplingParams(10, temperature=0.9, top_p=0.9, top_k=12, repetition_penalty=1.2, needs_alternatives=True),
        SamplingParams(10, temperature=1.1, min_p=0.3, top_p=0.8, needs_alternatives=True),
        SamplingParams(10, temperature=0.0, repetition_penalty=1.5),
    ],
    ids=["plain", "all", "min-p", "greedy-penalty"],
)
def test_logprobs_are_those_of_decoding_without_a_cache(model: PreTrainedModel, sampling: SamplingParams) -> None:
    groups = sample(model, sampling, group_size=2)
    assert sum(len(completion.token_ids) for group in groups for completion in group) > 30
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            check(model, prompt, completion, sampling)


def test_greedy_is_transformers_own_greedy(model: PreTrainedModel) -> None:
    penalty = 1.6
    groups = sample(model, SamplingParams(20, temperature=0.0, repetition_penalty=penalty), group_size=1)
    config = GenerationConfig(
        max_new_tokens=20, do_sample=False, repetition_penalty=penalty, eos_token_id=EOS, pad_token_id=0
    )
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :]
        assert list(completion.token_ids) == expected.tolist()


def test_tokens_come_with_their_probabilities(model: PreTrainedModel) -> None:
    """Chi-square of first tokens, and of second tokens after the most frequent first one."""
    prompt, sampling = PROMPTS[2], SamplingParams(2, temperature=1.3, top_p=0.9, top_k=15)
    (group,) = sample(model, sampling, group_size=6000, prompts=[prompt], batch_size=3000)
    first = torch.tensor([completion.token_ids[0] for completion in group])
    assert_distributed(first, next_logprobs(model, prompt, sampling)[-1].exp())
    frequencies = torch.bincount(first, minlength=VOCAB)
    frequencies[EOS] = 0
    common = int(frequencies.argmax())
    second = torch.tensor([completion.token_ids[1] for completion in group if completion.token_ids[0] == common])
    assert_distributed(second, next_logprobs(model, [*prompt, common], sampling)[-1].exp())


def assert_distributed(tokens: Tensor, probs: Tensor) -> None:
    """Pearson's test at p = 0.001, tokens expected fewer than five times taken together."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs * len(tokens)
    assert counts[probs == 0].sum() == 0
    rare = (expected < 5) & (probs > 0)
    observed = torch.cat([counts[expected >= 5], counts[rare].sum()[None]])
    wanted = torch.cat([expected[expected >= 5], expected[rare].sum()[None].clamp(min=1e-9)])
    degrees = len(wanted) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson-Hilferty
    assert ((observed - wanted) ** 2 / wanted).sum().item() < limit
