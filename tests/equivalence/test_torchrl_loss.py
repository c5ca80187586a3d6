"""The clipped losses and the KL estimate equal torchrl's GRPOLoss.

Two of torchrl's choices are left out on purpose: its KL is averaged over padding too, so it is compared on tokens
without padding; and its CISPOLoss has no gradient on clipped tokens, which is not the paper's loss.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from factories import LOSS

from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.grpo import GRPO

pytestmark = pytest.mark.slow  # torchrl takes 8 s to import

SETTINGS = LOSS | {"clip_low": 0.15, "clip_high": 0.25, "kl_coef": 0.1, "entropy_coef": 0.0}


@pytest.fixture(scope="module")
def grpo_loss_class():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.objectives.llm import GRPOLoss
    return GRPOLoss


@pytest.mark.parametrize(("loss_class", "aggregation"), [(DAPO, "token_mean"), (GRPO, "prompt_mean")])
def test_clipped_surrogate_equals_torchrl(grpo_loss_class, padded_case, loss_class, aggregation):
    torchrl_loss = grpo_loss_class(
        None, clip_epsilon=(0.15, 0.25), entropy_bonus=False, aggregation=aggregation
    ).double()
    for seed in (0, 1, 2):
        case = padded_case(seed)
        log_weight = (case.logprobs - case.old_logprobs)[..., None]  # [B, C, 1]
        objective, _ = torchrl_loss._compute_policy_objective(
            log_weight, case.rewards[:, None, None].expand_as(log_weight)
        )
        expected = torchrl_loss._aggregate_loss_value(objective, case.mask.bool()).squeeze()
        actual = loss_class(**(SETTINGS | {"kl_coef": 0.0}))(*case.flat(case.rewards)).loss
        # torchrl keeps its clip bounds in float32
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
        torch.testing.assert_close(case.gradients(actual)[0], case.gradients(expected)[0], rtol=0, atol=1e-7)


def test_kl_term_equals_torchrl(grpo_loss_class, padded_case):
    from tensordict import TensorDict

    case = padded_case(3)
    is_token = case.mask.bool()
    torchrl_loss = grpo_loss_class(None, clip_epsilon=0.2, entropy_bonus=False)
    tokens = TensorDict({"_cur_log_prob": case.logprobs[is_token][None]}, batch_size=[1])
    expected, expected_kl = torchrl_loss._kl_to_ref(tokens, ref_log_prob=case.ref_logprobs[is_token][None], coeff=0.1)
    output = DAPO(**SETTINGS)(*case.flat(torch.zeros_like(case.rewards)))
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.metrics["kl_divergence"], expected_kl.detach())
    torch.testing.assert_close(case.gradients(output.loss)[0], case.gradients(expected)[0])
