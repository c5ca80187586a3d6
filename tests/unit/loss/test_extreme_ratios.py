"""Log-ratios of up to 200 nats in float32 against the plain formulas in float64, where nothing overflows and little
cancels.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from factories import make_batch
from torch import Tensor

from offline_grpo.loss.base import ClippedLoss, PolicyGradientLoss
from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO
from offline_grpo.types import BatchTotals, TokenBatch, TokenStats

LOSSES = [GRPO, DAPO, DrGRPO, GSPO, CISPO]
LENGTHS = (1, 2, 3, 6)
LIMIT = 16  # Dr. GRPO's constant length
HUGE = 1e29  # gradients beyond it are a refused update: their norm overflows
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dual_clip": {"dual_clip": 3.0},
    "token_mask": {"importance_correction": "token_mask", "importance_floor": 0.5},
    "sequence_truncate": {"importance_correction": "sequence_truncate", "importance_floor": 0.5},
    "kl": {"kl_coef": 0.5, "kl_importance_weight": True},
    "k3_without_ratio": {"kl_coef": 0.5},
    "rollout_kl": {"ratio_reference": "rollout", "kl_coef": 0.5, "kl_importance_weight": True},
}


def build(loss_class: type[PolicyGradientLoss], plain: dict[str, Any], variant: str) -> PolicyGradientLoss:
    clipped = {"dual_clip": None} if issubclass(loss_class, ClippedLoss) else {}
    changes = {name: value for name, value in VARIANTS[variant].items() if name != "dual_clip" or clipped}
    return loss_class(**{**plain, **clipped, **changes})


def draw(seed: int, advantages: tuple[float, ...]) -> tuple[Tensor, TokenBatch]:
    """Policy logprobs [T] and a batch in float32: log-ratios of 0, small, and far beyond what exp can take, in each
    combination.
    """
    generator = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)

    def pick(*values: float) -> Tensor:
        """Multiples of 1/64, so that sums and differences are exact in float32."""
        return torch.tensor(values)[torch.randint(len(values), (size,), generator=generator)]

    policy = -pick(0.5, 2.0, 7.0, 250.0)
    old = policy - pick(0.0, 0.0, 0.125, -0.125, 1.0, -1.0, 30.0, 79.0, 90.0, 200.0, -90.0, -200.0)
    rollout = old - pick(0.0, 0.0, 0.125, -0.125, 1.0, -1.0, 90.0, 200.0, -90.0, -200.0)
    ref = policy + pick(0.0, 0.0, 0.125, -0.125, 1.0, -4.0, 18.0, 30.0, -30.0)
    chosen = torch.tensor(advantages)[torch.randint(len(advantages), (len(LENGTHS),), generator=generator)]
    mask = torch.ones(size, dtype=torch.bool)
    return policy, make_batch(LENGTHS, mask, chosen, old, rollout_logprobs=rollout, ref_logprobs=ref)


def oracle(loss: PolicyGradientLoss, policy: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The gradient [T] of the formulas in docs/numerics.md, as they stand there, in float64, and what float32 may add
    to it.

    That is 0 but for the KL of GSPO, whose gradient is a difference between a sequence's tokens.
    """
    policy = policy.double().requires_grad_()
    found = (batch.old_logprobs, batch.rollout_logprobs, batch.ref_logprobs, batch.advantages)
    old, rollout, ref, adv = (x.double() for x in found)
    total, rounding = policy.new_zeros(()), torch.zeros_like(policy)
    end = 0
    for length in LENGTHS:
        at = slice(end, end := end + length)
        log_ratio = policy[at] - (rollout if loss.ratio_reference == "rollout" else old)[at]
        if isinstance(loss, GSPO):
            log_ratio = log_ratio.mean().expand(length)
        r, a = log_ratio.exp(), adv[at]
        clipped = torch.clip(r, 1 - loss.clip_low, 1 + loss.clip_high)
        if isinstance(loss, CISPO):
            surrogate = -clipped.detach() * a * policy[at]
        else:
            assert isinstance(loss, ClippedLoss)
            bound = math.inf if loss.dual_clip is None else loss.dual_clip
            surrogate = -torch.minimum(r.clip(max=bound) * a, clipped * a)
        q = old[at] - rollout[at]
        if "sequence" in loss.importance_correction:
            q = q.sum().expand(length)
        q, inside = q.exp(), (q.exp() >= loss.importance_floor) & (q.exp() <= loss.importance_cap)
        if loss.importance_correction.endswith("truncate"):
            surrogate = surrogate * q.clip(loss.importance_floor, loss.importance_cap)
        elif loss.importance_correction.endswith("mask"):
            surrogate = surrogate * q * inside
        d = ref[at] - policy[at]
        kl = (torch.expm1(d) - d) * (r if loss.kl_importance_weight else 1)
        weight = {GRPO: 1 / length / 4, GSPO: 1 / length / 4, DrGRPO: 1 / 4 / LIMIT}.get(type(loss), 1 / sum(LENGTHS))
        if isinstance(loss, GSPO) and loss.kl_coef and length > 1:
            rounding[at] = (1e-6 * weight * r * (d.exp() + d.square() + 1)).max().detach()
        total = total + weight * (surrogate + loss.kl_coef * kl).sum()
    return torch.autograd.grad(total, policy)[0], rounding


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss_class", LOSSES)
def test_gradients_are_those_of_the_formula(
    plain: dict[str, Any], loss_class: type[PolicyGradientLoss], variant: str
) -> None:
    loss = build(loss_class, plain, variant)
    # with a KL term none: a sum of both would round the smaller away
    advantages = (-2.0, -0.5, 0.0, 1.0, 1.5) if loss.kl_coef == 0 else (0.0,)
    totals = BatchTotals(sum(LENGTHS), len(LENGTHS), LIMIT)
    num_zero = 0
    for seed in range(20):
        logprobs, batch = draw(seed, advantages)
        logprobs.requires_grad_()
        output = loss(TokenStats(logprobs, torch.zeros_like(logprobs)), batch, totals)
        (actual,) = torch.autograd.grad(output.loss, logprobs)
        expected, rounding = oracle(loss, logprobs.detach(), batch)
        is_huge = expected.abs() > HUGE
        is_moderate = ~is_huge & (rounding < HUGE)
        assert ((actual - expected).abs() <= 1e-4 * expected.abs() + rounding + 1e-7)[is_moderate].all(), seed
        # beyond float32: inf, or inf - inf
        assert not (actual[is_huge] * expected[is_huge].sign() < HUGE / 10).any(), seed
        assert (actual[(expected == 0) & (rounding == 0)] == 0).all()
        assert all(value.isfinite() for name, value in output.metrics.items() if not name.startswith("loss"))
        num_zero += int(((expected == 0) & (logprobs - batch.old_logprobs > 88)).sum())
    assert num_zero > 3 or loss.kl_coef > 0
