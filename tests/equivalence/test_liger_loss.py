"""Every loss equals the function inside Liger's fused GRPO loss, in value and gradient. Liger has no entropy bonus."""

from __future__ import annotations

import pytest
import torch
from factories import LOSS

from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO

PLAIN = LOSS | {"clip_low": 0.15, "clip_high": 0.25, "entropy_coef": 0.0, "importance_cap": 1.4}
LOSSES = {"grpo": GRPO, "dapo": DAPO, "dr_grpo": DrGRPO, "gspo": GSPO, "cispo": CISPO}
VARIANTS = {
    "plain": {},
    "kl": {"kl_coef": 0.1},
    "kl_importance_weight": {"kl_coef": 0.1, "kl_importance_weight": True},
    "importance": {"importance_correction": "token_truncate"},
    "dual_clip": {"dual_clip": 1.35},
}


@pytest.fixture(scope="module")
def ppo_loss_fn():
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    return LigerFusedLinearGRPOFunction.ppo_loss_fn


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_gradient_and_metrics_equal_liger(ppo_loss_fn, padded_case, name, variant):
    case = padded_case(5)
    settings = PLAIN | VARIANTS[variant]
    if name == "cispo":
        settings = {key: value for key, value in settings.items() if key != "dual_clip"} | {"clip_low": 1.0}
    loss = LOSSES[name](**settings)
    truncated = (case.old_logprobs - case.rollout_logprobs).exp().clamp(max=loss.importance_cap)
    expected, liger_metrics = ppo_loss_fn(
        case.logprobs,
        case.mask,
        case.rewards,
        case.mask,
        ref_per_token_logps=case.ref_logprobs,
        old_per_token_logps=case.old_logprobs,
        epsilon_low=loss.clip_low,
        epsilon_high=1 + loss.clip_high if name == "cispo" else loss.clip_high,
        beta=loss.kl_coef,
        loss_type="grpo" if name == "gspo" else name,
        max_completion_length=case.max_new_tokens,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        vllm_is_ratio=truncated if variant == "importance" else None,
        delta=settings.get("dual_clip"),
        use_bias_correction_kl=loss.kl_importance_weight,
    )
    output = loss(*case.flat(case.rewards))  # any numbers do as advantages
    torch.testing.assert_close(output.loss, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(case.gradients(output.loss)[0], case.gradients(expected)[0], rtol=0, atol=1e-9)
    if variant == "kl":
        torch.testing.assert_close(output.metrics["kl_divergence"], liger_metrics[0].detach())
    if variant == "plain" and name != "cispo":  # Liger counts CISPO's clip for positive advantages alone
        torch.testing.assert_close(output.metrics["clip_frac"], liger_metrics[-1], check_dtype=False)
