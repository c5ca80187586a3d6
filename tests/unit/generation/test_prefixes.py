"""Further turns go on from kept keys and values: the same tokens as if everything were computed anew, for less work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from factories import make_qwen2
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from offline_grpo.generation import transformers_client
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.types import Completion, SamplingParams, SamplingRequest

INSTRUCTIONS = tuple(random.Random(1).choices(range(2, 25), k=50))
SAMPLING = SamplingParams(max_new_tokens=9)
PENALTY = SamplingParams(9, 0.8, 0.9, 10, repetition_penalty=1.3)


def play(
    model, tokenizer, sampling: SamplingParams = SAMPLING, *, keeps: bool, batch_size: int = 64
) -> list[Completion]:
    """Four turns of twelve episodes, six problems of which begin alike; some rewrite what was said, some end early, and
    three begin when others are at their third turn.
    """
    client = TransformersClient(model, tokenizer, batch_size=batch_size)
    chance, answers = random.Random(2), {}
    said = {number: (*INSTRUCTIONS, *chance.choices(range(2, 25), k=number // 2 * 3 + 1)) for number in range(12)}

    def request(number: int, turn: int) -> SamplingRequest:
        return SamplingRequest(said[number], 1, 100 * number + turn, episode=number if keeps else None)

    asked: list[tuple[int, int]] = []

    def requests() -> Iterator[SamplingRequest | None]:
        for turn in range(6):
            for number in range(12):
                own = turn - 2 * (number >= 9)
                if not 0 <= own < 4 - number % 2:
                    continue
                if own > 0:
                    before = answers[number, own - 1].token_ids
                    rewritten = said[number][: len(INSTRUCTIONS) - 7 * (number == 5)]
                    beginning = rewritten if number % 4 == 1 else said[number]
                    said[number] = (*beginning, *before, *chance.choices(range(2, 25), k=1 + number % 5))
                asked.append((number, own))
                yield request(number, own)
            yield None

    for index, [completion] in client.generate(requests(), sampling):
        answers[asked[index]] = completion
    assert len(answers) == 12 * 4 - 6
    return [answers[key] for key in sorted(answers)]


def assert_equal(some: list[Completion], others: list[Completion]) -> None:
    assert [each.token_ids for each in some] == [each.token_ids for each in others]
    pairs = [torch.tensor([x for each in these for x in each.logprobs]) for these in (some, others)]
    torch.testing.assert_close(*pairs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("sampling", "batch_size"), [(SAMPLING, 64), (SAMPLING, 5), (PENALTY, 64)])
def test_the_tokens_are_those_of_whole_prompts(model, tokenizer, sampling: SamplingParams, batch_size: int) -> None:
    model.config.max_position_embeddings = 512
    anew = play(model, tokenizer, sampling, keeps=False)
    assert_equal(play(model, tokenizer, sampling, keeps=True, batch_size=batch_size), anew)


def test_a_cache_of_fixed_size_too(model, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model.config.max_position_embeddings = 512
    anew = play(model, tokenizer, keeps=False)
    monkeypatch.setattr(transformers_client, "has_graphs", lambda lm: True)
    assert_equal(play(model, tokenizer, keeps=True), anew)


def test_layers_that_forget_compute_everything(tokenizer) -> None:
    """A sliding window of eight tokens, in every other layer."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 25, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8, eos_token_id=1)
    forgetful: PreTrainedModel = Gemma2ForCausalLM(config).eval()
    assert_equal(play(forgetful, tokenizer, keeps=True), play(forgetful, tokenizer, keeps=False))


def test_a_turn_costs_its_new_tokens(tokenizer) -> None:
    model = make_qwen2(vocab_size=25, max_position_embeddings=512)
    work = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: work.append(out.shape[:2]))
    one = replace(SAMPLING, max_new_tokens=1)
    client = TransformersClient(model, tokenizer, batch_size=64)

    def requests() -> Iterator[SamplingRequest | None]:
        first = [
            SamplingRequest((*INSTRUCTIONS, 3 + number // 4, 9), 1, 7 + number, episode=number) for number in range(8)
        ]
        yield from first
        yield None
        yield from (replace(each, prompt_ids=(*each.prompt_ids, 7, 8, each.seed)) for each in first)

    assert len(list(client.generate(requests(), one))) == 16
    # The instructions of all, the rest of two problems but for the last token; then what comes behind each of eight.
    assert work == [(1, 50), (2, 1), (8, 1), (8, 3)]
