"""What is drawn from the trained module: its tokens by hand and by numpy, whatever the batch; nothing stays behind."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from factories import generate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import StaticLayer

from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.generation import transformers_client
from offline_grpo.generation.transformers_client import (
    Draws,
    RowEnds,
    SeededSampler,
    TransformersClient,
    invert_cdf,
    uniforms,
)
from offline_grpo.model.text import cut_at_stop
from offline_grpo.types import Completion, FinishReason, SamplingParams, ServedWeights

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9], list(range(2, 22)), [3, 3, 4, 8], [11, 12, 13]]
SEEDS = [100, 200, 300, 400, 500]
SAMPLING = SamplingParams(max_new_tokens=12)
EOS = 1


def sample(model, tokenizer, sampling: SamplingParams = SAMPLING, *, batch_size: int = 64) -> list[list[Completion]]:
    client = TransformersClient(model, tokenizer, batch_size=batch_size)
    return generate(client, PROMPTS, sampling, group_size=4, seeds=SEEDS)


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def logprobs(groups: list[list[Completion]]) -> torch.Tensor:
    return torch.tensor([logprob for group in groups for completion in group for logprob in completion.logprobs])


@pytest.mark.parametrize(
    "sampling",
    [SAMPLING, SamplingParams(12, 0.8, 0.9, 10, min_p=0.01, repetition_penalty=1.2)],
    ids=["plain", "filtered"],
)
def test_batches_change_nothing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sampling: SamplingParams
) -> None:
    for parameter in model.parameters():
        parameter.data *= 0.5  # less rounding noise than with peaked distributions
    together = sample(model, tokenizer, sampling)
    assert len({len(completion.token_ids) for group in together for completion in group}) > 2
    split = sample(model, tokenizer, sampling, batch_size=3)
    assert tokens(split) == tokens(together)
    torch.testing.assert_close(logprobs(split), logprobs(together), rtol=0, atol=1e-6)


@pytest.mark.parametrize("eos", [None, [1, 2, 3, 4]], ids=["all_go_on", "most_end_early"])
def test_a_cache_of_fixed_size_draws_the_same(
    model, tokenizer, monkeypatch: pytest.MonkeyPatch, eos: list[int] | None
) -> None:
    """As on a GPU, but for the graphs (see `tests/gpu/test_gpu_models.py`)."""
    model.generation_config.eos_token_id = eos
    growing = sample(model, tokenizer)
    monkeypatch.setattr(transformers_client, "has_graphs", lambda lm: True)
    made, initialize = [], StaticLayer.lazy_initialization
    monkeypatch.setattr(StaticLayer, "lazy_initialization", lambda *args: (made.append(1), initialize(*args)))
    fixed = sample(model, tokenizer)
    assert made
    assert tokens(fixed) == tokens(growing)
    torch.testing.assert_close(logprobs(fixed), logprobs(growing), rtol=0, atol=1e-5)


def test_eos_is_kept_and_ends_a_row_at_once(model, tokenizer) -> None:
    groups = sample(model, tokenizer, replace(SAMPLING, max_new_tokens=40))
    completions = [completion for group in groups for completion in group]
    stopped = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    assert len(stopped) > 5
    assert len(stopped) < len(completions)
    for completion in completions:
        is_stopped = completion.finish_reason is FinishReason.STOP
        assert completion.token_ids.count(EOS) == is_stopped
        assert (completion.token_ids[-1] == EOS) == is_stopped
        assert is_stopped or len(completion.token_ids) == 40
        assert len(completion.logprobs) == len(completion.token_ids)


def test_a_stop_string_ends_a_row_and_its_tokens_are_kept(model, tokenizer) -> None:
    long = replace(SAMPLING, max_new_tokens=40)
    plain = sample(model, tokenizer, long)
    texts = [tokenizer.decode(each.token_ids, skip_special_tokens=True) for group in plain for each in group]
    stop = tuple(text[5 : 5 + length] for text, length in zip(sorted(texts, key=len)[-3:], (3, 1, 2), strict=True))
    stopped = [completion for group in sample(model, tokenizer, replace(long, stop=stop)) for completion in group]
    num_cut = 0
    for before, after, text in zip(chain(*plain), stopped, texts, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        ended = tokenizer.decode(after.token_ids, skip_special_tokens=True)
        if any(string in text for string in stop):
            num_cut += 1
            assert after.finish_reason is FinishReason.STOP
            assert any(ended.endswith(string) for string in stop)
            assert not any(string in ended[:-1] for string in stop)
            assert cut_at_stop(ended, stop) == cut_at_stop(text, stop)
        else:
            assert (after.token_ids, after.finish_reason) == (before.token_ids, before.finish_reason)
    assert num_cut >= 3


def test_the_models_own_generation_config_does_not_leak(model, tokenizer) -> None:
    before = tokens(sample(model, tokenizer))
    drawing = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "repetition_penalty": 5.0}
    lengths = {"max_length": 4, "min_new_tokens": 11, "stop_strings": ["a"], "num_return_sequences": 2}
    words = {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8], "bad_words_ids": [[9]]}
    others = {"no_repeat_ngram_size": 1, "forced_eos_token_id": EOS, "use_cache": False}
    own = GenerationConfig(**drawing, **lengths, **words, **others, cache_implementation="static")
    model.generation_config = own
    as_dict = own.to_dict()
    assert tokens(sample(model, tokenizer)) == before
    assert model.generation_config is own
    assert own.to_dict() == as_dict


def test_random_state_and_modes_are_left_as_they_were(model, tokenizer) -> None:
    model.config.attention_dropout = 0.5
    model.train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    modes = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = sample(model, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.config.use_cache is False
    assert model.model.layers[0].gradient_checkpointing
    model.eval()
    assert tokens(sample(model, tokenizer)) == tokens(first)  # dropout was off in train mode too


def test_non_finite_logits_name_prompt_and_step(model, tokenizer) -> None:
    """A token whose embedding is NaN poisons the rows that saw it: here the second prompt's."""
    with torch.no_grad():
        model.model.embed_tokens.weight[20] = torch.nan
        model.lm_head.weight[20] = 0.0
    client = TransformersClient(model, tokenizer, batch_size=2)
    client.weights = ServedWeights(4)
    with pytest.raises(EngineError, match=r"token 0 after prompt 1 .*version 4"):
        generate(client, [[5, 6], [20, 3], [9]], replace(SAMPLING, max_new_tokens=1), group_size=1, seeds=[1, 2, 3])


def test_work_is_shared_within_a_group_and_dropped_at_its_end(model, tokenizer) -> None:
    """Counts the positions that pass through the first layer."""
    positions: list[tuple[int, int]] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: positions.append(tuple(out.shape[:2])))
    client = TransformersClient(model, tokenizer, batch_size=64)
    generate(client, [PROMPTS[2]], replace(SAMPLING, max_new_tokens=3), group_size=8, seeds=[0])
    # 19 prompt tokens once; the last prompt token and two more, 8 rows each
    assert positions == [(1, 19), (8, 1), (8, 1), (8, 1)]
    positions.clear()
    model.generation_config.eos_token_id = [1, 2, 3, 4]
    (group,) = generate(client, [PROMPTS[2]], replace(SAMPLING, max_new_tokens=40), group_size=32, seeds=[0])
    num_tokens = sum(len(completion.token_ids) for completion in group)
    longest = max(len(completion.token_ids) for completion in group)
    assert 32 * longest > 3 * num_tokens  # the work without compaction
    assert sum(rows for rows, _ in positions[1:]) < 2 * num_tokens


def test_wrong_requests_are_refused(model, tokenizer) -> None:
    client = TransformersClient(model, tokenizer, batch_size=4)
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        generate(client, [[3], []], SAMPLING, group_size=1, seeds=[1, 2])
    with pytest.raises(ConfigError, match=r"max_new_tokens=62: prompt 0 has 3 tokens .* 64; use 61 or less"):
        generate(client, [[3, 4, 5]], replace(SAMPLING, max_new_tokens=62), group_size=1, seeds=[1])
    with pytest.raises(ConfigError, match=r"has 64 tokens .* 64; leave out longer prompts \(data.max_prompt_tokens\)$"):
        generate(client, [[3] * 64], SAMPLING, group_size=1, seeds=[1])
    full = generate(client, [[3, 4, 5]], replace(SAMPLING, max_new_tokens=61), group_size=1, seeds=[8])
    assert 1 <= len(full[0][0].token_ids) <= 61


def test_invert_cdf_by_hand() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(7, 4)
    draws = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.99, 1 - 2**-24])
    assert invert_cdf(probs, draws).tolist() == [0, 0, 2, 2, 3, 3, 3]
    # no random number picks a filtered token: of these the last have probability 0, and rounding moves the sum off 1
    for total in (0.9999999, 3.7):
        probs = torch.zeros(1, 100)
        probs[0, :50] = total / 50
        assert invert_cdf(probs, torch.tensor([1 - 2**-24])).item() == 49
        probs[0, 0] = 0.0
        assert invert_cdf(probs, torch.tensor([0.0])).item() == 1


def test_random_numbers_are_those_of_a_philox_generator_with_the_seed_as_its_key() -> None:
    for seed in (0, 2**63 - 1, 2**64 + 7, 2**128 - 1):
        alone = np.random.Generator(np.random.Philox(key=seed)).random(9, dtype=np.float32)
        assert np.array_equal(uniforms([1, seed], 9)[1].numpy(), alone)


def test_sampler_records_the_sampling_distribution_and_forces_its_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, math.log(2)]])
    draws = Draws([1, 1], CPU, with_alternatives=True)
    forced = SeededSampler(draws, torch.tensor([[0.999], [0.3]]))(torch.zeros(2, 1, dtype=torch.long), logits.clone())
    assert forced.argmax(-1).tolist() == draws.token_ids[:, 0].tolist() == [2, 1]
    total = math.e + math.e**2 + 1
    assert draws.logprobs[:, 0].tolist() == pytest.approx([-math.log(total), -math.log(4)], abs=1e-6)
    draws.num_tokens += 1
    assert [completion.alternatives for completion in draws.completions(0)] == [((0, 1),), ((0, 2),)]


@pytest.mark.parametrize(("stop", "num_tokens"), [("\u00e9#", 5), ("#\u00e9", 7)])
def test_stop_strings_of_a_byte_level_tokenizer(stop: str, num_tokens: int) -> None:
    """Characters outside ASCII take several tokens, so a stop string may be longer in tokens than in characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    token_ids = torch.tensor([tokenizer.encode("a \u00e9#bc"), tokenizer.encode("xxxxxxx")])  # [2, 7]
    draws = Draws([7, 7], CPU)
    ends = RowEnds(draws, [], [stop], tokenizer)
    for step in range(7):
        draws.token_ids[:, step] = token_ids[:, step]
        draws.step += 1
        ends(token_ids[:, : step + 1], None)
    assert draws.num_tokens.tolist() == [num_tokens, 7]
    assert draws.ended.tolist() == [stop != "#\u00e9", False]
