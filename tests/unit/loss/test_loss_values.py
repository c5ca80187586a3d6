"""Each loss on two completions of 1 and 3 tokens, against values worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dppo import DPPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO
from offline_grpo.loss.sapo import SAPO

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


@pytest.mark.parametrize(
    ("loss_class", "expected", "grads", "clip_frac"),
    [
        # ratios to the sampler 2.0 | 1.0, 1.5, 0.7, bounds 0.8 and 1.2: token losses 4.0 | -1.0, -1.2 (cut), -0.7
        (GRPO, (4.0 - 2.9 / 3) / 2, [4.0 / 2, -1.0 / 6, 0.0, -0.7 / 6], 1 / 4),
        (DAPO, (4.0 - 2.9) / 4, [4.0 / 4, -1.0 / 4, 0.0, -0.7 / 4], 1 / 4),
        (DrGRPO, (4.0 - 2.9) / 16, [4.0 / 16, -1.0 / 16, 0.0, -0.7 / 16], 1 / 4),
        (GSPO, (4.0 - 1.05 ** (1 / 3)) / 2, [4.0 / 2] + [-(1.05 ** (1 / 3)) / 6] * 3, 0.0),
        (CISPO, None, [2.4 / 4, -1.0 / 4, -1.2 / 4, -0.8 / 4], 3 / 4),
    ],
)
def test_ratio_to_the_sampler(plain, completions, loss_class, expected, grads, clip_frac):
    """The old policy, whose ratios are RATIOS, plays no part."""
    policy, batch, totals = completions(RATIOS, ADVANTAGES)
    to_sampler = torch.tensor([2.0, 1.0, 1.5, 0.7], dtype=torch.float64)
    batch = replace(batch, rollout_logprobs=policy.logprobs.detach() - to_sampler.log())
    settings = plain | {"ratio_reference": "rollout"} | ({} if loss_class is CISPO else {"dual_clip": None})
    output = loss_class(**settings)(policy, batch, totals)
    (grad,) = torch.autograd.grad(output.loss, policy.logprobs)
    assert grad.tolist() == pytest.approx(grads)
    assert expected is None or output.loss.item() == pytest.approx(expected)
    assert output.metrics["clip_frac"].item() == pytest.approx(clip_frac)
    assert output.metrics["ratio_mean"].item() == pytest.approx(
        1.05 ** (1 / 3) * 3 / 4 + 2.0 / 4 if loss_class is GSPO else 5.2 / 4
    )


@pytest.mark.parametrize(
    ("loss_class", "expected", "grads"),
    [
        (DAPO, 0.7336797757, [-0.0766080053, 0.0, -0.1034099906, 0.2093833300, 0.0, 0.0, 0.1991715845]),
        (GRPO, 0.5467978872, [-0.0893760058, 0.0, -0.1206449887, 0.1832104133, 0.0, 0.0, 0.1742751360]),
    ],
)
def test_ratio_to_the_sampler_equals_verls_bypass_mode(plain, completions, loss_class, expected, grads):
    """Recorded from verl 0.9.1, `compute_policy_loss_bypass_mode` with loss_type=ppo_clip, clip_ratio_low=0.2,
    clip_ratio_high=0.28 and clip_ratio_c=3, in float64: loss_agg_mode token-mean (DAPO) and seq-mean-token-mean (GRPO).
    Its own rounding constants are 1e-8."""
    policy, batch, totals = completions([[1.0] * 3, [1.0] * 4], [0.8, -1.2])
    sampler = torch.tensor([-0.5, -1.0, -2.0, -0.7, -1.5, -0.2, -3.0], dtype=torch.float64)
    logprobs = torch.tensor([-0.9, -0.6, -2.1, -0.5, -0.1, -0.9, -2.85], dtype=torch.float64, requires_grad=True)
    loss = loss_class(**plain | {"ratio_reference": "rollout", "clip_high": 0.28, "dual_clip": 3.0})
    output = loss(replace(policy, logprobs=logprobs), replace(batch, rollout_logprobs=sampler), totals)
    assert output.loss.item() == pytest.approx(expected, abs=1e-7)
    assert torch.autograd.grad(output.loss, logprobs)[0].tolist() == pytest.approx(grads, abs=1e-7)
    assert output.metrics["clip_frac"].item() == pytest.approx(3 / 7)  # verl: 2/7 by the range and 1/7 by the dual clip


@pytest.mark.parametrize(
    ("loss_class", "settings", "expected", "grads"),
    [
        (
            DPPO,
            {"divergence": "tv", "clip_low": 0.2, "clip_high": 0.15, "ratio_cap": 1.5},
            -0.4119367814,
            [-0.0766080053, 0.0, -0.1034099906, 0.2093833300, 0.2571428571, 0.0, 0.1991715845],
        ),
        (
            DPPO,
            {"divergence": "kl", "clip_low": 0.4, "clip_high": 0.05, "ratio_cap": 1.5},
            -0.4885527997,
            [-0.0766080053, 0.0, -0.1034099906, 0.2093833300, 0.2571428571, 0.0851289092, 0.1991715845],
        ),
        (
            SAPO,
            {"tau_pos": 1.0, "tau_neg": 1.05},
            0.5817945925,
            [-0.0869907862, -0.1873501292, -0.1203722626, 0.1807572001, 0.0908931061, 0.0695178118, 0.1730231244],
        ),
    ],
)
def test_dppo_and_sapo_equal_verl(plain, completions, loss_class, settings, expected, grads):
    """Recorded from verl 0.9.1, `compute_policy_loss_dppo_tv`, `_dppo_kl` and `_sapo`, in float64, as above."""
    policy, batch, totals = completions([[1.0] * 3, [1.0] * 4], [0.8, -1.2])
    sampler = torch.tensor([-0.5, -1.0, -2.0, -0.7, -1.5, -0.2, -3.0], dtype=torch.float64)
    logprobs = torch.tensor([-0.9, -0.6, -2.1, -0.5, -0.1, -0.9, -2.85], dtype=torch.float64, requires_grad=True)
    names = {field.name for field in fields(loss_class)}
    given = {name: value for name, value in plain.items() if name in names}
    loss = loss_class(**given | {"ratio_reference": "rollout"} | settings)
    output = loss(replace(policy, logprobs=logprobs), replace(batch, rollout_logprobs=sampler), totals)
    assert output.loss.item() == pytest.approx(expected, abs=1e-7)
    assert torch.autograd.grad(output.loss, logprobs)[0].tolist() == pytest.approx(grads, abs=1e-7)
    assert output.metrics["clip_frac"].item() == pytest.approx(grads.count(0.0) / 7)


def test_completions_whose_mean_ratio_is_far_from_1_are_masked_as_by_verl(plain, completions):
    """verl 0.9.1, `compute_rollout_rejection_mask`, rollout_rs=seq_mean_k1, threshold 0.9_1.1111: [1, 0, 0, 1]."""
    log_ratios = [[0.1, 0.2, -0.1], [0.5, 0.4, 0.3, 0.9], [-0.3, -0.1], [0.02, 0.01]]
    policy, batch, totals = completions([[1.0] * len(own) for own in log_ratios], [1.0] * 4)
    flat = torch.tensor([each for own in log_ratios for each in own], dtype=torch.float64)
    batch = replace(batch, rollout_logprobs=batch.old_logprobs - flat)
    loss = GRPO(**plain | {"dual_clip": None, "geometric_bounds": [0.9, 1 / 0.9]})
    gradient = torch.autograd.grad(loss(policy, batch, totals).loss, policy.logprobs)[0]
    assert (gradient != 0).tolist() == [True] * 3 + [False] * 6 + [True] * 2
