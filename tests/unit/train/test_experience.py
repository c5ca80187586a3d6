"""From groups to the batch that is trained on: what any rollout source may hand over."""

import random
from dataclasses import replace

import pytest
import torch
from factories import make_completion, make_passes, make_qwen2, make_rollout, make_scoring

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Advantage
from offline_grpo.loss.base import reward_penalty
from offline_grpo.train.advantage import GroupMean
from offline_grpo.train.batch import build_batch
from offline_grpo.train.experience import check_groups, prepare_batch
from offline_grpo.train.metrics import rollout_metrics
from offline_grpo.types import FinishReason, Problem, Rollout, RolloutGroup, Score, UnusableGroup

TWO_TURNS = Rollout(
    token_ids=(5, 6, 7, 8, 9, 10, 11),
    is_sampled=(False, True, True, False, False, True, True),
    logprobs=(0.0, -0.5, -0.6, 9.9, 9.9, -0.7, -0.8),
    versions=(0, 3, 3, 0, 0, 4, 4),
    temperature=0.5,
    finish_reason=FinishReason.STOP,
    text="two turns",
    score=Score(1.0, True, {}),
)


FIXED = {"updates_per_iteration": None, "grad_accum_steps": 2, "batch_size": 2}


def group(*rollouts, advantages=None):
    return RolloutGroup(None, rollouts, advantages)


def test_what_a_source_returns_is_checked():
    assert check_groups([]) == []  # one process of several may have none
    for check, found in ((check_groups, None), (check_groups, [group(TWO_TURNS), None]), (rollout_metrics, [])):
        with pytest.raises(ConfigError, match=r"^rollouts(: |=)"):
            check(found)


def test_what_an_environment_wrote_between_two_turns_is_not_trained_on():
    batch = build_batch([TWO_TURNS, make_rollout([4], [3, 2], temperature=2.0)])
    assert batch.completion_mask.tolist() == [False, True, True, False, False, True, True, False, True, True]
    assert batch.rollout_logprobs.tolist() == pytest.approx([0, -0.5, -0.6, 0, 0, -0.7, -0.8, 0, -1, -1])
    assert batch.temperature.tolist() == [0.5] * 7 + [2.0] * 3
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    metrics = rollout_metrics([group(TWO_TURNS, make_rollout([4], [3, 2]))])
    assert metrics["num_completion_tokens"] == 6


def test_tokens_of_groups_that_were_thrown_away_were_sampled_too():
    metrics = rollout_metrics([replace(group(make_rollout([4], [3, 2])), num_replaced=2, num_discarded_tokens=10)])
    assert (metrics["num_completion_tokens"], metrics["completion_tokens_mean"]) == (12, 2)


def test_rewards_that_differ_by_rounding_have_no_correlation_with_lengths():
    silent = group(*(make_rollout([4], [3] * length, reward=0.1) for length in (1, 2, 3)))
    assert len({0.1, sum([0.1] * 3) / 3}) == 2  # so a reward less its group's mean is not 0
    assert "reward_length_correlation" not in rollout_metrics([silent])
    longer = group(*(make_rollout([4], [3] * length, reward=float(length)) for length in (1, 2)))
    assert rollout_metrics([longer])["reward_length_correlation"] == pytest.approx(1.0)
    assert rollout_metrics([silent, longer])["reward_length_correlation"] == pytest.approx(0.5 / (0.5 * 2.5) ** 0.5)


def test_advantages_of_the_source_are_used_token_by_token():
    given = ((0.0, 1.0, 2.0, 77.0, 77.0, -1.0, -2.0), (0.0, 0.5, 0.5))
    groups = [
        group(TWO_TURNS, make_rollout([4], [3, 2]), advantages=given),
        group(make_rollout([4], [3], reward=1.0), make_rollout([4], [2], reward=0.0)),
    ]
    batch, advantages, metrics, _ = prepare_batch(groups, make_passes())
    assert batch is not None
    ours = 0.5 / (0.5**0.5 + 1e-4)  # (reward - mean) / (sample std + 1e-4)
    assert batch.advantages.tolist() == pytest.approx([0, 1, 2, 0, 0, -1, -2, 0, 0.5, 0.5, 0, ours, 0, -ours])
    assert metrics["advantage_mean"] == pytest.approx((1 + 2 - 1 - 2 + 0.5 + 0.5) / 8)
    # means of 1, 2, -1, -2 and of 0.5, 0.5
    assert advantages == [pytest.approx([0.0, 0.5]), pytest.approx([ours, -ours])]
    assert metrics["num_groups_zero_signal"] == 0


class AgainstTheOldPolicy(Advantage):
    """Per token, how unlikely the policy finds it; only rewards above 1 teach anything."""

    needs = ("old",)

    def __call__(self, groups, batch):
        rows = iter((-batch.old_logprobs).split(batch.rollout_lengths))
        return [[next(rows).tolist() for _ in group.rollouts] for group in groups]

    def is_silent(self, group):
        return all(rollout.score.reward <= 1 for rollout in group.rollouts)


def test_an_advantage_sees_the_old_policy_and_decides_what_no_signal_is():
    passes = make_passes(advantage=AgainstTheOldPolicy())
    groups = [group(*(make_rollout([4], [3, token], reward=reward) for token in (2, 5))) for reward in (0.5, 1.5)]
    batch, _, metrics, _ = prepare_batch(groups, passes)
    assert batch is not None
    assert (metrics["num_groups_zero_signal"], metrics["num_groups_trained"]) == (1, 1)
    whole = build_batch(groups[1].rollouts)
    expected = passes.policy.logprobs(whole)
    assert batch.advantages.tolist() == pytest.approx((-expected).tolist(), abs=1e-5)
    assert batch.old_logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_only_tokens_of_high_entropy_get_an_advantage():
    passes = make_passes(top_entropy_frac=0.5)
    groups = [group(*(make_rollout([4], [3, token, 6, 2], reward=float(token)) for token in (7, 5)))]
    batch = prepare_batch(groups, passes).batch
    assert batch is not None
    entropy = passes.policy.scoring.entropy(batch)
    highest = entropy[batch.completion_mask].topk(4).indices
    assert batch.advantages[batch.completion_mask].nonzero().flatten().tolist() == sorted(highest.tolist())


@pytest.mark.parametrize(
    ("settings", "rewards", "trained"),
    [  # groups of two; updates of 2 sequences, of 4, or so many that share all
        (FIXED, [(0, 0), (0, 1), (1, 1), (1, 1)], [0, 1, 2]),
        ({"updates_per_iteration": 2}, [(0, 0), (0, 1), (1, 1), (0, 1)], [1, 3]),
        ({"updates_per_iteration": 3}, [(0, 0), (0, 0), (1, 0), (1, 1)], [0, 2]),
    ],
)
def test_groups_without_signal_stay_where_updates_need_them(settings, rewards, trained):
    passes = make_passes(**settings)
    groups = [
        group(*(make_rollout([4], [n + 5], reward=float(reward)) for reward in own)) for n, own in enumerate(rewards)
    ]
    batch, advantages, metrics, _ = prepare_batch(groups, passes, fills_updates=True)
    assert batch is not None
    owners = [token - 5 for token in batch.token_ids[batch.completion_mask].tolist()]
    assert owners == [n for n in trained for _ in range(2)]
    assert metrics["num_groups_trained"] == len(trained)
    assert len(passes.updates_of(batch.num_rollouts)) == len(passes.updates_of(8))
    assert [any(own) for own in advantages] == [first != second for first, second in rewards]


def test_given_advantages_and_a_penalty_on_rewards_contradict_each_other():
    passes = make_passes()
    passes.reward_penalty = reward_penalty(replace(passes.loss, kl_placement="reward", kl_coef=0.1))
    passes.reference = passes.policy
    with pytest.raises(ConfigError, match=r"train\.loss\.kl_placement=reward: .*use train\.loss\.kl_placement=loss"):
        prepare_batch([group(TWO_TURNS, advantages=((1.0,) * 7,))], passes)


def test_a_group_of_truncated_completions_is_not_trained():
    passes = make_passes(mask_truncated=True)
    completion = make_completion([3, 2, 5], reason=FinishReason.LENGTH)
    cut = [make_rollout([4], completion, reward=reward) for reward in (0.0, 1.0)]
    alike = [make_rollout([4], [6, 7], reward=1.0) for _ in range(2)]
    batch, _, metrics, _ = prepare_batch([group(*cut), group(*alike)], passes)
    assert batch is None, "of the other group the rewards are equal"
    assert (metrics["num_groups_trained"], metrics["num_groups_masked"]) == (0, 1)


@pytest.mark.parametrize("given", [None, ((0.0, 9.0, 9.0, 9.0), (0.0, -0.5, -0.5), (0.0, -0.5, -0.5))])
def test_advantages_of_truncated_completions_that_are_not_trained_on_do_not_count(given):
    passes = make_passes(mask_truncated=True, advantage=GroupMean())
    cut = make_rollout([4], make_completion([3, 2, 5], reason=FinishReason.LENGTH), reward=1.5)
    whole = [make_rollout([4], [6, token], reward=0.75) for token in (7, 8)]
    metrics = prepare_batch([group(cut, *whole, advantages=given)], passes).metrics
    number = 2 if given is None else 4  # tokens
    names = ("advantage_mean", "num_advantages_positive", "num_advantages_negative")
    assert [metrics[name] for name in names] == [-0.25 if given is None else -0.5, 0, number]
    assert metrics["advantage_std"] == 0


def test_a_truncated_completion_pays_its_penalty_although_its_tokens_are_not_trained_on():
    """Its reward counts in the group's mean, with the penalty; its tokens are masked afterwards."""
    reference = make_scoring(make_qwen2(initializer_range=0.2))
    passes = make_passes(mask_truncated=True, advantage=GroupMean(), reference=reference)
    passes.loss = replace(passes.loss, kl_placement="reward", kl_coef=0.5, kl_estimator="k2")
    passes.reward_penalty = reward_penalty(passes.loss)
    cut = make_rollout([4], make_completion([3, 2, 5], reason=FinishReason.LENGTH), reward=1.0)
    whole = make_rollout([4], [6, 7], reward=0.0)
    batch, _, metrics, _ = prepare_batch([group(cut, whole)], passes)
    assert batch is not None

    everything = build_batch([cut, whole])
    old, ref = passes.policy.logprobs(everything), reference.logprobs(everything)
    squares = (old - ref).square() / 2 * 0.5  # kl_coef * k2, [7]
    paid = [squares[:4].sum().item(), squares[4:].sum().item()]
    assert min(paid) > 0.01
    half = (1.0 - paid[0] - (0.0 - paid[1])) / 2
    assert metrics["kl_penalty_mean"] == pytest.approx(sum(paid) / 2, abs=1e-5)
    assert batch.advantages.tolist() == pytest.approx([0, 0, 0, 0, 0, -half, -half], abs=1e-5)
    assert batch.completion_mask.tolist() == [False] * 5 + [True] * 2
    assert batch.old_logprobs.tolist() == pytest.approx([0] * 5 + old[5:].tolist(), abs=1e-5)
    assert batch.ref_logprobs.tolist() == pytest.approx([0] * 5 + ref[5:].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"token_ids": (5, 6, 7, 8, 9, 10, 12)}, "vocabulary"),
        ({"logprobs": (0.0, 1.0, -0.6, 9.9, 9.9, -0.7, -0.8)}, "numbers"),
        ({"score": Score(float("inf"), True, {})}, "numbers"),
        ({"is_sampled": (False,) * 7}, None),  # an agent that asked nothing
    ],
)
def test_a_group_from_elsewhere_is_checked_before_it_is_learnt_from(change, reason):
    found = None
    try:
        group(replace(TWO_TURNS, **change)).check(vocab_size=12, max_tokens=7)
    except UnusableGroup as error:
        found = error.reason
    assert found == reason
    with pytest.raises(UnusableGroup):
        group(TWO_TURNS).check(vocab_size=12, max_tokens=6)


def test_rollouts_without_a_reward_are_left_out_as_if_they_had_not_been_sampled():
    """A quarter of the scores fail: batch, advantages and metrics are those of the rest."""
    rng, passes = random.Random(5), make_passes()
    groups, rest, expected = [], [], []
    for _ in range(12):
        rollouts = [make_rollout([4], [3 + rng.randrange(5), 2], reward=rng.choice([0.0, 0.5, 1.0])) for _ in range(4)]
        failed = [rng.random() < 0.25 for _ in rollouts]
        pairs = list(zip(rollouts, failed, strict=True))
        groups.append(group(*(replace(r, score=Score.unscored("raised")) if fails else r for r, fails in pairs)))
        scored = [r for r, fails in pairs if not fails]
        rest += [group(*scored)] if len(scored) > 1 else []
        expected.append([not fails and len(scored) > 1 for fails in failed])
    groups.append(group(*(replace(r, score=Score.unscored()) for r in rollouts[:3]), rollouts[3]))
    batch, advantages, metrics, _ = prepare_batch(groups, passes)
    of_rest, numbers, metrics_of_rest, _ = prepare_batch(rest, passes)
    assert batch is not None
    assert of_rest is not None
    for name in ("token_ids", "sequence_ids", "completion_mask", "advantages", "old_logprobs"):
        assert torch.equal(getattr(batch, name), getattr(of_rest, name)), name
    assert [[each is not None for each in own] for own in advantages] == [*expected, [False] * 4]
    assert [each for own in advantages for each in own if each is not None] == [each for own in numbers for each in own]
    counts = {"num_groups": 13.0, "num_groups_unscored": 13.0 - len(rest)}
    assert metrics == metrics_of_rest | counts
    known = [rollout for each in groups for rollout in each.rollouts if rollout.score.is_scored]
    means, means_of_rest = rollout_metrics(groups), rollout_metrics([group(*known)])
    for name in ("reward_mean", "reward_std", "success_rate"):
        assert means[name] == means_of_rest[name]
    assert prepare_batch([groups[-1]], passes).batch is None


def test_a_part_that_does_not_apply_to_a_completion_is_not_in_the_mean_of_that_part():
    scores = (Score(1.5, True, {"right": 1.0, "brief": 0.5}), Score(0.0, False, {"right": 0.0}), Score.unscored())
    problem = Problem("easy::p", (), "")
    found = rollout_metrics([RolloutGroup(problem, tuple(replace(make_rollout([4], [3]), score=s) for s in scores))])
    for place in ("", "task/easy/"):
        assert [found[f"{place}reward/{name}"] for name in ("right", "brief")] == [0.5, 0.5]
        assert found[f"{place}reward_mean"] == 0.75
    assert found["scoring/num_failed_none"] == 1
