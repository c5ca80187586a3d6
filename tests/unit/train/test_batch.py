"""Flat batches, and how they are cut into updates, shares and microbatches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from factories import make_completion, make_passes, make_rollout

from offline_grpo.errors import ConfigError
from offline_grpo.train.batch import (
    build_batch,
    share_of_rank,
    totals_of,
    with_advantages,
)
from offline_grpo.types import FinishReason


def rollout(prompt, completion, reason=FinishReason.STOP):
    logprobs = tuple(-0.1 * t for t in completion)
    return make_rollout(prompt, make_completion(completion, logprobs, reason), temperature=0.7)


def example():
    return build_batch([rollout([5, 6], [7]), rollout([8], [9, 10], FinishReason.LENGTH)])


def test_layout_is_the_documented_example():
    batch = example()
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.completion_mask.tolist() == [False, False, True, False, True, True]
    assert batch.sequence_lengths == (3, 3)
    assert batch.rollout_logprobs.tolist() == pytest.approx([0, 0, -0.7, 0, -0.9, -1.0])
    assert batch.temperature.tolist() == pytest.approx([0.7] * 6)


def test_advantages_stand_on_completion_tokens_alone():
    assert with_advantages(example(), [2.0, -1.0]).advantages.tolist() == [0, 0, 2, 0, -1, -1]


def test_select_takes_whole_sequences_and_renumbers_them():
    batch = with_advantages(example(), [2.0, -1.0])
    part = batch.select([1])
    assert part.token_ids.tolist() == [8, 9, 10]
    assert part.sequence_ids.tolist() == [0, 0, 0]
    assert part.advantages.tolist() == [0, -1, -1]
    both = batch.select([1, 0])
    assert both.token_ids.tolist() == [8, 9, 10, 5, 6, 7]
    assert both.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert totals_of(batch, [1], max_new_tokens=4).num_completion_tokens == 2


def test_alternatives_follow_their_tokens():
    """By hand: sets of 2, 0 and 3 tokens beside 7, 9 and 10."""
    sets = ((), (), (1, 2)), ((), (), (3, 4, 5))
    plain = rollout([5, 6], [7]), rollout([8], [9, 10])
    batch = build_batch([replace(r, alternatives=own) for r, own in zip(plain, sets, strict=True)])
    found = [batch, batch.select([1]), batch.select([1, 0])]
    masked = batch.masked(torch.tensor([False, False, True, False, False, False]))
    found += [masked, masked.select([0]), masked.select([1])]
    counts = [each.num_alternatives.tolist() for each in found]
    assert counts[:3] == [[0, 0, 2, 0, 0, 3], [0, 0, 3], [0, 0, 3, 0, 0, 2]]
    assert counts[3:] == [[0, 0, 2, 0, 0, 0], [0, 0, 2], [0, 0, 0]]
    assert [each.alternatives.tolist() for each in found] == [
        [1, 2, 3, 4, 5],
        [3, 4, 5],
        [3, 4, 5, 1, 2],
        [1, 2],
        [1, 2],
        [],
    ]
    with pytest.raises(ConfigError, match="1 of 2 were sampled with"):
        build_batch([replace(plain[0], alternatives=sets[0]), plain[1]])


def passes_with(**settings):
    passes = make_passes()
    return replace(passes, config=replace(passes.config, **settings))


def test_updates_cover_every_sequence_once():
    assert passes_with(updates_per_iteration=2).updates_of(5) == [range(3), range(3, 5)]
    accumulated = passes_with(updates_per_iteration=None, batch_size=1, grad_accum_steps=2)
    assert accumulated.updates_of(5) == [range(2), range(2, 4), range(4, 5)]
    assert passes_with(updates_per_iteration=4).updates_of(2) == [range(1), range(1, 2)]
    for k in range(1, 8):
        passes = passes_with(updates_per_iteration=k)
        for n in range(1, 30):
            parts = passes.updates_of(n)
            assert [s for part in parts for s in part] == list(range(n))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_sequence_is_trained_by_one_process_and_the_longest_come_first():
    """By hand: 9, 8 and 7 go to processes 0, 1 and 2; then 4 to 2, 3 to 1, 3 to 0, and 2 to the first of those with 11
    tokens, which is process 1.
    """
    lengths = [3, 9, 4, 7, 3, 8, 2]
    shares = [share_of_rank(range(7), lengths, rank=rank, world_size=3) for rank in range(3)]
    assert shares == [[1, 4], [5, 0, 6], [3, 2]]
    assert share_of_rank([6, 2, 1], lengths, rank=0, world_size=1) == [1, 2, 6]


@pytest.mark.parametrize(
    ("lengths", "padded", "settings", "expected"),
    [
        ([1] * 5, True, {"batch_size": 2}, [[0, 1], [2, 3], [4]]),
        ([10, 4, 4, 2], False, {"batch_size": None, "tokens_per_microbatch": 20}, [[0, 1, 2, 3]]),
        ([10, 4, 4, 2], True, {"batch_size": None, "tokens_per_microbatch": 20}, [[0, 1], [2, 3]]),
        ([10, 4, 4, 2], True, {"batch_size": None, "tokens_per_microbatch": 4}, [[0], [1], [2], [3]]),
    ],
)
def test_microbatches_are_of_so_many_sequences_or_tokens_with_padding(lengths, padded, settings, expected):
    passes = passes_with(**settings)
    passes.policy.scoring.layout = SimpleNamespace(pads=padded)
    batch = SimpleNamespace(sequence_lengths=lengths)
    assert passes.microbatches(range(len(lengths)), batch) == [(chosen, True) for chosen in expected]
