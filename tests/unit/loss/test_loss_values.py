"""Each loss on two completions of 1 and 3 tokens, against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO

RATIOS = [[1.1], [1.1, 0.5, 2.0]]
ADVANTAGES = [-2.0, 1.0]
# Clipped surrogates with bounds 0.8 and 1.2: token losses 2.2 | -1.1, -0.5, -1.2; the last is cut.


@pytest.mark.parametrize(
    ("loss_class", "expected", "weights"),
    [
        (GRPO, (2.2 - 2.8 / 3) / 2, [1 / 2, 1 / 6, 1 / 6]),  # mean over sequences of token means
        (DAPO, (2.2 - 2.8) / 4, [1 / 4, 1 / 4, 1 / 4]),  # mean over tokens
        (DrGRPO, (2.2 - 2.8) / 16, [1 / 16, 1 / 16, 1 / 16]),  # 2 sequences of constant length 8
    ],
)
def test_clipped_losses(plain, completions, loss_class, expected, weights):
    policy, batch, totals = completions(RATIOS, ADVANTAGES)
    output = loss_class(**plain, dual_clip=None)(policy, batch, totals)
    assert output.loss.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(output.loss, policy.logprobs)
    assert grad.tolist() == pytest.approx([2.2 * weights[0], -1.1 * weights[1], -0.5 * weights[2], 0.0])
    assert output.metrics["clip_high_frac"].item() == pytest.approx(1 / 4)
    assert output.metrics["clip_low_frac"].item() == 0
    assert output.metrics["ratio_mean"].item() == pytest.approx(4.7 / 4)


def test_gspo_shares_one_ratio_over_the_sequence(plain, completions):
    policy, batch, totals = completions(RATIOS, ADVANTAGES)
    output = GSPO(**plain, dual_clip=None)(policy, batch, totals)
    sequence_ratio = (1.1 * 0.5 * 2.0) ** (1 / 3)  # 1.032, inside the bounds though two of its tokens are not
    assert output.loss.item() == pytest.approx((2.2 - sequence_ratio) / 2)
    (grad,) = torch.autograd.grad(output.loss, policy.logprobs)
    assert grad.tolist() == pytest.approx([1.1] + [-sequence_ratio / 6] * 3)
    assert output.metrics["clip_frac"].item() == 0


def test_cispo_bounds_the_weight_but_keeps_every_gradient(plain, completions):
    policy, batch, totals = completions(RATIOS, ADVANTAGES)
    output = CISPO(**plain)(policy, batch, totals)
    (grad,) = torch.autograd.grad(output.loss, policy.logprobs)
    assert grad.tolist() == pytest.approx([2.2 / 4, -1.1 / 4, -0.8 / 4, -1.2 / 4])
    assert output.loss.item() == pytest.approx((grad * policy.logprobs).sum().item())
    assert output.metrics["clip_low_frac"].item() == pytest.approx(1 / 4)
    assert output.metrics["clip_high_frac"].item() == pytest.approx(1 / 4)
    assert output.metrics["clip_frac"].item() == pytest.approx(1 / 2)


@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_ratio_one_gives_the_policy_gradient(plain, completions, correction):
    for loss_class in (GRPO, DAPO, CISPO):
        settings = plain | {"importance_correction": correction} | ({} if loss_class is CISPO else {"dual_clip": None})
        policy, batch, totals = completions([[1.0], [1.0], [1.0]], [0.5, -2.0, 0.0])
        (grad,) = torch.autograd.grad(loss_class(**settings)(policy, batch, totals).loss, policy.logprobs)
        assert grad.tolist() == pytest.approx([-0.5 / 3, 2.0 / 3, 0.0])
