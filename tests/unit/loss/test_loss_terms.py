"""KL estimates, importance weights and the surrogate's clip against numbers worked out by hand or by enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from offline_grpo.loss import terms

CLIP_TABLE = [
    # advantage, ratio, loss, d loss / d logprob
    (+1.0, 0.5, -0.5, -0.5),  # below the range but wanted up: pulled back
    (+1.0, 2.0, -1.2, 0.0),  # above the range already: nothing more to gain
    (-1.0, 0.5, +0.8, 0.0),  # below the range already: nothing more to gain
    (-1.0, 2.0, +2.0, +2.0),  # above the range but wanted down: pulled back, without bound
    (+1.0, 1.1, -1.1, -1.1),  # inside the range
    (-1.0, 0.9, +0.9, +0.9),
]


def surrogate_at(ratio: float, advantage: float, dual_clip: float | None = None):
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = terms.clipped_surrogate(
        logprob.exp(), torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip
    )
    (grad,) = torch.autograd.grad(result.loss.sum(), logprob)
    return result, grad.item()


@pytest.mark.parametrize(("advantage", "ratio", "loss", "grad"), CLIP_TABLE)
def test_clip_table(advantage, ratio, loss, grad):
    result, actual_grad = surrogate_at(ratio, advantage)
    assert result.loss.item() == pytest.approx(loss)
    assert actual_grad == pytest.approx(grad)
    assert (result.is_clipped_low | result.is_clipped_high).item() == (grad == 0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "grad"),
    [(-1.0, 5.0, 3.0, 0.0), (-1.0, 2.0, 2.0, 2.0), (+1.0, 5.0, -1.2, 0.0), (+1.0, 0.5, -0.5, -0.5)],
)
def test_dual_clip_bounds_only_negative_advantages(advantage, ratio, loss, grad):
    result, actual_grad = surrogate_at(ratio, advantage, dual_clip=3.0)
    assert result.loss.item() == pytest.approx(loss)
    assert actual_grad == pytest.approx(grad)
    assert result.is_clipped_high.item() == (grad == 0)


POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def test_kl_estimates_by_hand():
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    ref_logprobs = logprobs - math.log(2)
    values = {name: terms.kl_estimate(logprobs, ref_logprobs, name).item() for name in ("k1", "k2", "k3")}
    assert values == pytest.approx({"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)})


def test_the_ratio_makes_the_gradient_of_k1_and_k3_that_of_the_kl():
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    exact = (logprobs.exp() * (logprobs - REFERENCE.log())).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    ratio = (logprobs - POLICY.log()).exp()
    for estimator in ("k1", "k3"):
        kl = terms.kl_estimate(logprobs, REFERENCE.log(), estimator)
        (weighted,) = torch.autograd.grad((POLICY * kl * ratio).sum(), logits, retain_graph=True)
        (unweighted,) = torch.autograd.grad((POLICY * kl).sum(), logits, retain_graph=True)
        torch.testing.assert_close(weighted, exact_grad)
        assert not torch.allclose(unweighted, exact_grad)
        if estimator == "k1":
            torch.testing.assert_close(unweighted, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("token_truncate", [2.0, 0.5, 1.5, 1.2]),
        ("sequence_truncate", [2.0, 2.0, 1.8, 1.8]),
        ("token_mask", [0.0, 0.5, 1.5, 1.2]),
        ("sequence_mask", [0.0, 0.0, 1.8, 1.8]),
    ],
)
def test_importance_weights_by_hand(completions, correction, expected):
    old_over_rollout = torch.tensor([8.0, 0.5, 1.5, 1.2], dtype=torch.float64)
    _, batch, _ = completions([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0], rollout_logprobs=-1.0 - old_over_rollout.log())
    mask = torch.ones(4, dtype=torch.float64)
    weights = terms.importance_weights(batch, mask, correction=correction, cap=2.0, floor=0.0)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_mismatch_averages_to_the_exact_kl_of_engine_to_trainer(completions):
    _, batch, _ = completions([[1.0, 1.0, 1.0]], [1.0])
    batch = batch.with_logprobs(old=REFERENCE.log())
    object.__setattr__(batch, "rollout_logprobs", POLICY.log())
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(POLICY), torch.distributions.Categorical(REFERENCE)
    ).item()
    mean = {name: (POLICY * values).sum().item() for name, values in terms.mismatch(batch).items()}
    assert mean["mismatch/kl_k1"] == pytest.approx(exact)
    assert mean["mismatch/kl_k3"] == pytest.approx(exact)
    assert mean["mismatch/ratio_mean"] == pytest.approx(1.0)
