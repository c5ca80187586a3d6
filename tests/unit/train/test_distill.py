"""On-policy distillation: values and gradients against transformers' own forward, and that a student learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import (
    LOSS,
    make_llama,
    make_passes,
    make_qwen2,
    make_rollout,
    make_scoring,
)
from torch import Tensor, nn

from offline_grpo.errors import ConfigError
from offline_grpo.loss.grpo import GRPO
from offline_grpo.train.advantage import Distill, GroupStd
from offline_grpo.train.batch import totals_of
from offline_grpo.train.experience import prepare_batch
from offline_grpo.types import FinishReason, RolloutGroup

PROMPT = (5, 6, 7)
COMPLETIONS = ([8, 9, 10], [11, 3, 2, 9, 4], [12], [1, 1])
TEMPERATURE = 0.7
DISTILL = Distill(teacher="teacher", weight=2.0, base=None)


def by_hand(model: nn.Module, completion: list[int]) -> Tensor:
    """Logprobs [C] of a completion, in the model's precision."""
    logits = model(torch.tensor([[*PROMPT, *completion]])).logits[0, len(PROMPT) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def groups() -> list[RolloutGroup]:
    rollouts = [
        make_rollout(PROMPT, completion, temperature=TEMPERATURE, reward=reward)
        for completion, reward in zip(COMPLETIONS, (1.0, 0.0, 0.0, 0.0), strict=True)
    ]
    return [RolloutGroup(None, tuple(rollouts[:2])), RolloutGroup(None, tuple(rollouts[2:]))]


def test_value_and_gradient_are_those_of_a_forward_by_hand() -> None:
    student, teacher = make_qwen2().double(), make_llama().double()
    passes = make_passes(batch_size=2, advantage=DISTILL, teacher=make_scoring(teacher))
    batch, _, metrics, _ = prepare_batch(groups(), passes)
    assert batch is not None
    assert metrics["num_groups_trained"] == 2, "equal rewards are no reason to drop a group"
    theirs = [by_hand(teacher, completion).detach() for completion in COMPLETIONS]
    advantages = [2.0 * (own - -1.0) for own in theirs]  # all rollouts were sampled at a logprob of -1
    torch.testing.assert_close(
        batch.advantages[batch.completion_mask].double(), torch.cat(advantages), atol=1e-5, rtol=0
    )
    assert metrics["distill/reverse_kl"] == pytest.approx(-torch.cat(advantages).mean().item() / 2, abs=1e-5)
    assert metrics["distill/teacher_nll"] == pytest.approx(-torch.cat(theirs).mean().item(), abs=1e-5)

    loss = GRPO(**{**LOSS, "entropy_coef": 0.0})
    scoring = make_scoring(student)
    stats = scoring(batch)
    part = batch.with_logprobs(old=stats.logprobs.detach())
    loss(stats, part, totals_of(batch, range(4), max_new_tokens=20)).loss.backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in student.named_parameters() if parameter.grad is not None
    }
    student.zero_grad()
    own = [by_hand(student, completion) for completion in COMPLETIONS]
    (-torch.stack([(row * a).mean() for row, a in zip(own, advantages, strict=True)]).mean()).backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_completions_that_are_cut_off_count_in_the_denominator_as_elsewhere() -> None:
    """Two of four sequences are trained, in groups of two: the loss is a quarter of the sum of their means."""
    cut, whole = groups()
    cut = RolloutGroup(None, tuple(replace(each, finish_reason=FinishReason.LENGTH) for each in cut.rollouts))
    teacher = make_scoring(make_llama())
    for advantage in (GroupStd(), DISTILL):
        settings = {"mask_truncated": True, "drop_zero_signal_groups": advantage is DISTILL}
        passes = make_passes(advantage=advantage, teacher=teacher, **settings)
        batch, _, metrics, _ = prepare_batch([cut, whole], passes)
        assert batch is not None
        totals = totals_of(batch, range(batch.num_sequences), max_new_tokens=20)
        assert (totals.num_rollouts, totals.num_completion_tokens) == (4, 3)
        assert metrics["num_groups_masked"] == 1
    stats = passes.policy.scoring(batch)
    part = batch.with_logprobs(old=stats.logprobs.detach())
    loss = GRPO(**{**LOSS, "entropy_coef": 0.0})(stats, part, totals).loss
    one, other = (batch.advantages[batch.sequence_ids == s][len(PROMPT) :].mean().item() for s in (2, 3))
    assert loss.item() == pytest.approx(-(one + other) / 4)


def test_it_is_added_to_an_advantage_from_rewards() -> None:
    found, teacher = [], make_scoring(make_llama())
    for advantage in (DISTILL, GroupStd(), replace(DISTILL, base=GroupStd())):
        passes = make_passes(advantage=advantage, teacher=teacher, drop_zero_signal_groups=False)
        batch = prepare_batch(groups(), passes).batch
        assert batch is not None
        found.append(batch.advantages)
    torch.testing.assert_close(found[0] + found[1], found[2])
    assert found[1].abs().max() > 0.5


def test_what_has_no_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train.advantage.teacher=null: 4 of 4 rollouts come without a teacher's"):
        prepare_batch(groups(), make_passes(advantage=replace(DISTILL, teacher=None)))
    own = replace(groups()[0], advantages=((0.0,) * 6, (0.0,) * 8))
    with pytest.raises(ConfigError, match="come with advantages of their own"):
        prepare_batch([own], make_passes(advantage=DISTILL, teacher=make_scoring(make_llama())))
