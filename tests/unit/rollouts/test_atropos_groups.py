"""From the JSON of a group to a `RolloutGroup`: what an environment says is kept, and what nothing can be learnt from
is dropped.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from atropos_parts import group, pair
from factories import make_passes

from offline_grpo.rollouts.atropos_groups import GroupReader, MissingLogprobs
from offline_grpo.train.advantage.distill import Distill
from offline_grpo.train.batch import build_batch
from offline_grpo.train.experience import prepare_batch
from offline_grpo.types import UnusableGroup

VOCAB = 30
MAX_TOKENS = 12
read = GroupReader(
    decode=lambda ids: " ".join(map(str, ids)), vocab_size=VOCAB, max_members=4, max_token_len=MAX_TOKENS
)


def test_what_was_sampled_is_told_by_the_masks() -> None:
    """In several turns too: what the environment wrote in between is not trained on, and is the same tokens."""
    fields: dict[str, Any] = {
        "tokens": [[5, 6, 7, 8, 9, 10, 11], [5, 6]],
        "masks": [[-100, -100, 7, 8, -100, -100, 11], [-100, 6]],
        "scores": [1, -0.5],
        "inference_logprobs": [[1.0, 1.0, -0.5, -1, 1.0, 1.0, 0.0], [1.0, -2.0]],
        "ref_logprobs": [[1.0, 1.0, -0.25, -9, 1.0, 1.0, -3.0], [1.0, -900.0]],
        "advantages": [[0, 0, 1.5, 2, 0, 0, 3], [0, -1]],
        "messages": None,
        "env_id": 3,
        "distill_token_ids": None,
    }
    found = read(fields)
    first, second = found.rollouts
    assert first.token_ids == (5, 6, 7, 8, 9, 10, 11)
    assert first.is_sampled == (False, False, True, True, False, False, True)
    assert first.logprobs == (1.0, 1.0, -0.5, -1.0, 1.0, 1.0, 0.0)
    assert first.ref_logprobs == (1.0, 1.0, -0.25, -9.0, 1.0, 1.0, -3.0)
    batch = build_batch(found.rollouts, mask_truncated=False)
    assert batch.rollout_logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, 0.0, 0.0, 0.0, 0.0, -2.0], "no placeholders"
    assert (first.versions, first.finish_reason, first.text, found.problem) == ((-1,) * 7, None, "7 8 11", None)
    assert [(r.score.reward, r.score.is_correct) for r in (first, second)] == [(1.0, True), (-0.5, False)]
    assert found.advantages == ((0, 0, 1.5, 2, 0, 0, 3), (0, -1))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.7, "top_p": 1}}, [0.7, 0.7]),
        ({"generation_params": {"temperature": 0.7}, "overrides": [{"temperature": 2}, {}]}, [2.0, 0.7]),
    ],
)
def test_temperatures_of_sequences_requests_and_groups(fields: dict[str, Any], expected: list[float]) -> None:
    assert [rollout.temperature for rollout in read(pair(1, **fields)).rollouts] == expected


def test_a_sample_whose_advantage_is_set_to_zero() -> None:
    """It counts in the group's mean, and its gradient is exactly 0."""
    passes = make_passes(updates_per_iteration=1)
    sequences = (([5, 6], [7, 2]), ([5, 6], [8, 2]), ([5, 6], [9, 2]))
    plain = read(group(*sequences, scores=[3.0, 0.0, 0.0]))
    overrides = [{"set_advantage_to_zero": True}, {}, {"set_advantage_to_zero": False}]
    zeroed = read(group(*sequences, scores=[3.0, 0.0, 0.0], overrides=overrides))
    batch, [own], _, _ = prepare_batch([zeroed], passes)
    _, [usual], _, _ = prepare_batch([plain], passes)
    assert own == [0.0, *usual[1:]]
    assert usual[0] > 1
    assert batch is not None
    assert batch.advantages.tolist()[:4] == [0.0] * 4
    given = read(group(*sequences, advantages=[[0, 0, 1.0, 2.0]] * 3, overrides=overrides))
    batch, [own], _, _ = prepare_batch([given], passes)
    assert own == [0.0, 1.5, 1.5]
    assert batch is not None
    assert batch.advantages.tolist() == [0.0] * 4 + [0.0, 0.0, 1.0, 2.0] * 2


def test_reference_logprobs_that_come_with_all_rollouts_replace_a_pass() -> None:
    passes = make_passes(updates_per_iteration=1)
    passes.reference = passes.policy.scoring
    ref = [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, -1.5, -2.0, -3.0]]
    with_ref, without = read(pair(1, ref_logprobs=ref)), read(pair(1))
    batch = prepare_batch([with_ref], passes).batch
    assert batch is not None
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.5, -2.0, -3.0]
    mixed = prepare_batch([with_ref, without], passes).batch
    assert mixed is not None
    assert mixed.ref_logprobs is not None
    assert torch.allclose(mixed.ref_logprobs, passes.policy.logprobs(mixed), atol=1e-5)


ASKED = [[[], [6], [1, 7], [2, 3]], [[], [6], [8, 1], [1], [2]]]
TOLD = [[[], [-9.0], [-0.5, -1.5], [-0.25, -4.0]], [[], [-9.0], [-1.0, -3.0], [-2.0], [-3.0]]]


def test_what_a_teacher_says_of_sampled_tokens_is_kept() -> None:
    """Of each position's few tokens that one which was sampled; servers give logprobs of prompts at temperature 1."""
    told = {"distill_token_ids": ASKED, "distill_logprobs": TOLD}
    first, second = read(pair(1, **told)).rollouts
    assert (first.teacher_logprobs, second.teacher_logprobs) == ((0, 0, -1.5, -0.25), (0, 0, -1.0, -2.0, -3.0))
    passes = make_passes(advantage=Distill(teacher=None, weight=1.0, base=None))
    batch = prepare_batch([read(pair(1, **told))], passes).batch
    assert batch is not None
    assert batch.advantages.tolist() == [0, 0, -1.0, 0.25, 0, 0, -0.5, -1.5, -2.5]
    lacking = {"distill_token_ids": [ASKED[0], [[], [6], [9, 1], [1], [2]]], "distill_logprobs": TOLD}
    assert [r.teacher_logprobs is None for r in read(pair(1, **lacking)).rollouts] == [False, True]
    hot = read(pair(1, **told, generation_params={"temperature": 0.7}))
    assert [r.teacher_logprobs for r in hot.rollouts] == [None, None]


LONG = [-0.5] * 5
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "half a token": ("malformed", {"tokens": [[5.5, 6, 7, 2], [5, 6, 8, 1, 2]]}),
    "another mask": ("malformed", {"masks": [[-100, -100, 7, 3], [-100, -100, 8, 1, 2]]}),
    "NaN": ("numbers", {"scores": [math.nan, 0.0]}),
    "a logprob above 0": ("numbers", {"inference_logprobs": [[1.0, 1.0, -0.5, 1.0], LONG]}),
    "another vocabulary": ("vocabulary", {"tokens": [[VOCAB, 6, 7, 2], [5, 6, 8, 1, 2]]}),
    "nothing to train on": ("masks", {"masks": [[-100] * 4, [-100] * 5]}),
    "a first token": ("masks", {"masks": [[5, 6, 7, 2], [-100, -100, 8, 1, 2]]}),
    "a teacher of fewer tokens": ("malformed", {"distill_token_ids": ASKED, "distill_logprobs": [TOLD[0], TOLD[0]]}),
    "images": ("images", {"images": [["data:image/png;base64,"], None]}),
}


def test_what_nothing_can_be_learnt_from_is_dropped() -> None:
    for name, (reason, fields) in WRONG.items():
        with pytest.raises(UnusableGroup) as caught:
            read({**pair(1), **fields})
        assert caught.value.reason == reason, name
    for reason, sequences in (("too_many", [([1], [2])] * 5), ("too_long", [([1] * 6, [2] * 7), ([1], [2])])):
        with pytest.raises(UnusableGroup) as caught:
            read(group(*sequences))
        assert caught.value.reason == reason
    assert len(read(group(([1] * 6, [2] * 6), ([1], [2]))).rollouts[0].token_ids) == 12


@pytest.mark.parametrize("empty", [[], [[], []]])
def test_empty_fields_are_missing(empty: list[list[float]]) -> None:
    """Environments of atroposlib that do not set them send a list for no sequence, or an empty one for each."""
    found = read(pair(1, advantages=empty, ref_logprobs=empty, overrides=[], images=[], group_overrides={}))
    assert found.advantages is None
    assert [rollout.ref_logprobs for rollout in found.rollouts] == [None, None]
    with pytest.raises(MissingLogprobs, match=r"inference_logprobs .* environment 7 have none"):
        read(pair(1, advantages=[], inference_logprobs=empty, env_id=7))
