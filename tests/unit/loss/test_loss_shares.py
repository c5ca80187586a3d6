"""What holds for every loss: shares add up, order and masked tokens do not matter, nothing is mutated, no signal means
no gradient.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offline_grpo.errors import ConfigError
from offline_grpo.loss.base import ClippedLoss
from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO
from offline_grpo.loss.terms import Surrogate, segment_sum
from offline_grpo.types import TokenBatch, TokenStats

LOSSES = [GRPO, DAPO, DrGRPO, GSPO, CISPO]
EVERYTHING = {
    "kl_coef": 0.1,
    "kl_importance_weight": True,
    "entropy_coef": 0.03,
    "importance_correction": "sequence_mask",
    "importance_cap": 1.3,
    "off_policy_mask": 0.1,
    "geometric_bounds": [0.7, 1.3],
}


@pytest.fixture(params=LOSSES, ids=lambda loss_class: loss_class.__name__)
def loss(request, plain):
    """Each loss with all of its terms."""
    clipped = {"dual_clip": 1.4} if issubclass(request.param, ClippedLoss) else {}
    return request.param(**(plain | EVERYTHING | clipped))


def gradients(value: Tensor, policy: TokenStats) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, (policy.logprobs, policy.entropy), retain_graph=True)


def select(policy: TokenStats, batch: TokenBatch, sequences: list[int]) -> tuple[TokenStats, TokenBatch]:
    tokens = torch.cat([torch.nonzero(batch.sequence_ids == s).flatten() for s in sequences])
    return TokenStats(policy.logprobs[tokens], policy.entropy[tokens]), batch.select(sequences)


@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4], [5]], [[5, 2], [0, 3, 1, 4]]])
def test_shares_of_any_split_and_order_add_up(loss, random_inputs, split):
    policy, batch, totals = random_inputs()
    whole = loss(policy, batch, totals)
    shares = [loss(*select(policy, batch, sequences), totals) for sequences in split]
    total = torch.stack([share.loss for share in shares]).sum()
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(gradients(total, policy), gradients(whole.loss, policy))
    for name, value in whole.metrics.items():
        torch.testing.assert_close(torch.stack([share.metrics[name] for share in shares]).sum(), value, msg=name)


def test_metrics_are_detached_scalars_and_terms_add_up(loss, random_inputs):
    output = loss(*random_inputs())
    assert all(value.shape == () and not value.requires_grad for value in output.metrics.values())
    metrics = output.metrics
    assert metrics["loss_total"] == metrics["loss_pg"] + metrics["loss_kl"] + metrics["loss_entropy"] == output.loss
    assert all(metrics[name] != 0 for name in ("loss_pg", "loss_kl", "loss_entropy"))


def test_nothing_outside_the_mask_matters(loss, random_inputs):
    policy, batch, totals = random_inputs()
    outside = ~batch.completion_mask
    junk = torch.where(outside, 3.0, 0.0).double()
    dirty = {
        name: getattr(batch, name) + sign * junk
        for name, sign in (("advantages", 1), ("rollout_logprobs", 1), ("old_logprobs", -1), ("ref_logprobs", 1))
    }
    dirty_policy = TokenStats(policy.logprobs - junk, policy.entropy + junk)
    clean, actual = loss(policy, batch, totals), loss(dirty_policy, replace(batch, **dirty), totals)
    assert actual.loss == clean.loss
    assert actual.metrics == clean.metrics
    for grad in gradients(actual.loss, dirty_policy):
        assert torch.all(grad[outside] == 0)
        assert torch.any(grad[~outside] != 0)


def test_a_fully_masked_sequence_adds_nothing_but_counts(plain, random_inputs):
    policy, batch, totals = random_inputs()
    kept = [0, 1, 3, 4, 5]  # sequence 2 has no completion token
    loss = GRPO(**plain, dual_clip=None)
    without = loss(*select(policy, batch, kept), replace(totals, num_rollouts=5)).loss
    torch.testing.assert_close(loss(policy, batch, totals).loss, without * 5 / 6)


def test_a_batch_without_completion_tokens_has_loss_zero(loss, random_inputs):
    policy, batch, totals = random_inputs()
    output = loss(
        policy,
        replace(batch, completion_mask=torch.zeros_like(batch.completion_mask)),
        replace(totals, num_completion_tokens=0),
    )
    assert output.loss == 0
    assert all(torch.all(grad == 0) for grad in gradients(output.loss, policy))


class SummedSurrogate(GRPO):
    """What somebody writes who thinks of a loss as one number."""

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
        found = super().surrogate(ratio, logprobs, advantages)
        return found._replace(loss=found.loss.sum())


class RatioPerSequence(GRPO):
    """Forgets to give each token its sequence's."""

    def ratio(self, log_ratio: Tensor, mask: Tensor, batch: TokenBatch) -> Tensor:
        return segment_sum(log_ratio, batch).exp()


@pytest.mark.parametrize(("loss_class", "name"), [(SummedSurrogate, "surrogate"), (RatioPerSequence, "ratio")])
def test_a_method_of_ones_own_that_gives_no_number_per_token_is_named(plain, random_inputs, loss_class, name):
    with pytest.raises(ConfigError, match=rf"^train\.loss: what {loss_class.__name__}\.{name}\(\) returns"):
        loss_class(**plain, dual_clip=None)(*random_inputs())
