from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offline_grpo.generation.transformers_client import Draws, RowEnds, SeededSampler, invert_cdf, uniforms
from offline_grpo.types import FinishReason

CPU = torch.device("cpu")


def test_invert_cdf_by_hand() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(7, 4)
    draws = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.99, 1 - 2**-24])
    assert invert_cdf(probs, draws).tolist() == [0, 0, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("total", [0.9999999, 3.7])
def test_the_largest_random_number_never_picks_a_filtered_token(total: float) -> None:
    """The last tokens have probability 0, and rounding moves the cumulative sum's end off 1."""
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
    draws = Draws([1, 1], CPU)
    forced = SeededSampler(draws, torch.tensor([[0.999], [0.3]]))(torch.zeros(2, 1, dtype=torch.long), logits.clone())
    assert forced.argmax(-1).tolist() == draws.token_ids[:, 0].tolist() == [2, 1]
    total = math.e + math.e**2 + 1
    assert draws.logprobs[:, 0].tolist() == pytest.approx([-math.log(total), -math.log(4)], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_logit_is_noticed_whatever_is_drawn(bad: float) -> None:
    for position in range(3):
        logits = torch.zeros(2, 3)
        logits[1, position] = bad
        for noise in (None, torch.tensor([[0.5], [0.1]])):
            draws = Draws([1, 1], CPU)
            SeededSampler(draws, noise)(torch.zeros(2, 1, dtype=torch.long), logits.clone())
            draws.num_tokens += 1
            assert draws.first_non_finite() == (1, 0)


def test_what_follows_a_rows_end_is_not_looked_at() -> None:
    draws = Draws([3, 3], CPU)
    draws.num_tokens[:] = torch.tensor([2, 3])
    draws.ended[0] = True
    draws.token_ids[:] = torch.tensor([[4, 5, 6], [7, 8, 9]])
    draws.logprobs[0, 2] = math.nan
    assert draws.first_non_finite() is None
    first, second = draws.completions(version=3)
    assert (first.token_ids, first.finish_reason, first.versions) == ((4, 5), FinishReason.STOP, (3, 3))
    assert (second.token_ids, second.finish_reason) == ((7, 8, 9), FinishReason.LENGTH)
    assert len(first.logprobs) == 2


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
