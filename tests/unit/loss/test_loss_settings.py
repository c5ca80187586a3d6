"""Every setting acts, and every setting outside its range is refused by name. A new field must be added to BOTH, or
the test fails.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
import torch

from offline_grpo.errors import ConfigError
from offline_grpo.loss.base import reward_penalty
from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dppo import DPPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO
from offline_grpo.loss.sapo import SAPO
from offline_grpo.train.advantage import group_advantages

LOSSES = [GRPO, DAPO, DrGRPO, GSPO, CISPO, SAPO, DPPO]
BOTH = {  # values with which each acts, all together, and another value
    "clip_low": (0.05, 0.1),
    "clip_high": (0.05, 0.1),
    "dual_clip": (1.12, None),
    "ratio_reference": ("old", "rollout"),
    "kl_coef": (0.1, 0.2),
    "kl_estimator": ("k3", "k2"),
    "kl_placement": ("loss", "reward"),
    "kl_importance_weight": (True, False),
    "entropy_coef": (0.03, 0.0),
    "importance_correction": ("token_truncate", "sequence_mask"),
    "importance_cap": (1.3, 1.6),
    "importance_floor": (0.8, 0.7),
    "off_policy_mask": (None, 0.1),
    "geometric_bounds": (None, [0.9, 1.1]),
    "tau_pos": (1.0, 2.0),
    "tau_neg": (1.05, 2.0),
    "divergence": ("tv", "kl"),
    "ratio_cap": (1.1, 20.0),
}
ACTIVE = {name: active for name, (active, _) in BOTH.items()}
REWARDS = [
    [0.3, 1.0, -0.5, 0.1, 0.0, 0.9],
    [0.0, 1.0, 1.0, 1.0, 0.2, 1.0],
    [0.0, 0.1, 0.0, 0.0, 0.0, 0.1],
    [2.0, 0.0, 1.0, 1.0, 0.0, 1.0],
]
INVALID = [
    *((GRPO, {"clip_low": 1.5}), (GRPO, {"clip_high": -0.1}), (GRPO, {"dual_clip": 1.04}), (GRPO, {"kl_coef": -0.1})),
    *((GRPO, {"entropy_coef": float("nan")}), (GRPO, {"importance_cap": 0.9}), (GRPO, {"importance_floor": -0.1})),
    *((GRPO, {"off_policy_mask": 0.0}), (GRPO, {"geometric_bounds": [1.1, 1.2]}), (SAPO, {"tau_pos": 0.0})),
    (DPPO, {"ratio_cap": 0.5}),
    (GRPO, {"importance_correction": "token_truncate", "ratio_reference": "rollout"}),  # it would correct twice
]


def build(loss_class, settings):
    names = {field.name for field in fields(loss_class)}
    return loss_class(**{name: value for name, value in settings.items() if name in names})


def outcome(loss, inputs):
    """Loss and gradients from the rewards on: what a run with this loss would see."""
    policy, batch, totals = inputs
    advantages = torch.tensor(group_advantages(REWARDS, scale="group"), dtype=torch.float64).flatten()  # [S]
    batch = replace(batch, advantages=advantages[batch.sequence_ids] * batch.completion_mask)
    value = loss(policy, batch, totals).loss
    grads = torch.autograd.grad(value, (policy.logprobs, policy.entropy), allow_unused=True, materialize_grads=True)
    return torch.cat([value.detach()[None], *grads])


@pytest.mark.parametrize(
    ("loss_class", "name"),
    [(loss_class, field.name) for loss_class in LOSSES for field in fields(loss_class)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_setting_acts(plain, random_inputs, loss_class, name):
    settings = plain | ACTIVE | ({"importance_correction": "none"} if name == "ratio_reference" else {})
    before = outcome(build(loss_class, settings), random_inputs(num_sequences=24))
    after = outcome(build(loss_class, settings | {name: BOTH[name][1]}), random_inputs(num_sequences=24))
    assert not torch.allclose(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("loss_class", "change"), INVALID)
def test_invalid_values_are_refused_by_name(plain, loss_class, change):
    name, value = next(iter(change.items()))
    with pytest.raises(ConfigError, match=rf"^train\.loss\.{re.escape(f'{name}={value}')}: "):
        build(loss_class, plain | ACTIVE | change)


def test_kl_in_reward_leaves_the_loss_alone_and_keeps_the_metric(plain, random_inputs):
    base = plain | {"dual_clip": None}
    in_reward = build(GRPO, base | {"kl_coef": 0.1, "kl_placement": "reward"})
    without, metrics = build(GRPO, base)(*random_inputs()), in_reward(*random_inputs()).metrics
    assert reward_penalty(in_reward) is not None
    assert reward_penalty(build(GRPO, base | {"kl_coef": 0.1})) is None
    assert metrics["loss_kl"] == 0
    assert metrics["loss_total"] == without.loss
    assert metrics["kl_divergence"] > 0


def test_reference_is_needed_for_a_kl_term_alone(plain, random_inputs):
    policy, batch, totals = random_inputs()
    batch = replace(batch, ref_logprobs=None)
    base = plain | {"dual_clip": None}
    with pytest.raises(ValueError, match="ref_logprobs"):
        build(GRPO, base | {"kl_coef": 0.1})(policy, batch, totals)
    metrics = build(GRPO, base)(policy, batch, totals).metrics
    assert metrics["loss_kl"] == 0
    assert "kl_divergence" not in metrics, "it was not measured"
