"""From rewards to the gradient, every loss equals TRL's GRPOTrainer.

TRL's own code computes advantages and importance weights (`_generate_and_score_completions`) and the loss
(`_compute_loss`), on a stand-in for the trainer that holds nothing but settings and the logprobs that its model would
have returned.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import LOSS, make_rollout
from torch import Tensor

from offline_grpo.loss.base import ClippedLoss, PolicyGradientLoss, RangedLoss
from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO
from offline_grpo.loss.sapo import SAPO
from offline_grpo.train.advantage import GDPO, group_advantages
from offline_grpo.train.batch import build_batch
from offline_grpo.types import RolloutGroup, Score

PLAIN = {name: value for name, value in LOSS.items() if "clip" not in name}
PLAIN |= {"entropy_coef": 0.0, "importance_cap": 1.4}
LOSSES = {
    "grpo": (GRPO, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    "dapo": (DAPO, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}),
    "dr_grpo": (DrGRPO, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    "gspo": (GSPO, {"clip_low": 0.1, "clip_high": 0.08, "dual_clip": None}),
    "cispo": (CISPO, {"clip_low": 1.0, "clip_high": 0.3}),
    "sapo": (SAPO, {"tau_pos": 1.0, "tau_neg": 1.3}),
}
VARIANTS = {
    "plain": {},
    "kl": {"kl_coef": 0.1},
    "kl_importance_weight": {"kl_coef": 0.1, "kl_importance_weight": True},
    "entropy": {"entropy_coef": 0.03},
    "token_truncate_floor": {"importance_correction": "token_truncate", "importance_floor": 0.8},
    "sequence_truncate": {"importance_correction": "sequence_truncate"},
    "token_mask": {"importance_correction": "token_mask", "importance_floor": 0.8},
    "sequence_mask": {"importance_correction": "sequence_mask"},
    "dual_clip": {"dual_clip": 1.35},
    "off_policy_mask": {"off_policy_mask": 0.1, "importance_correction": "sequence_mask"},
    "all": {
        "kl_coef": 0.1,
        "kl_importance_weight": True,
        "entropy_coef": 0.03,
        "importance_correction": "sequence_mask",
        "dual_clip": 1.35,
    },
}


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer import grpo_trainer
    return grpo_trainer.GRPOTrainer


def build(name: str, variant: str) -> PolicyGradientLoss:
    loss_class, settings = LOSSES[name]
    changes = dict(VARIANTS[variant])
    if not issubclass(loss_class, ClippedLoss):
        changes.pop("dual_clip", None)
    return loss_class(**(PLAIN | settings | changes))


def trl_stand_in(case, loss: PolicyGradientLoss, name: str, scale: str | None) -> SimpleNamespace:
    """What `GRPOTrainer` would be with the settings of `loss`."""
    sampler, reference = SimpleNamespace(training=True, is_gradient_checkpointing=False), SimpleNamespace()
    model_logprobs = {id(sampler): case.old_logprobs, id(reference): case.ref_logprobs, id(None): case.logprobs}
    alone = {"num_processes": 1, "process_index": 0, "sync_gradients": True, "device": "cpu"}
    identity = SimpleNamespace(
        gather=lambda x: x, pad_across_processes=lambda x, **_: x, reduce=lambda x, reduction: x, **alone
    )
    token_mask = [[int(x) for x in row[:length]] for row, length in zip(case.mask, case.lengths, strict=True)]
    sampled = [row[:length].tolist() for row, length in zip(case.rollout_logprobs, case.lengths, strict=True)]
    ids = [[7] * length for length in case.lengths]
    return SimpleNamespace(
        accelerator=identity,
        model=sampler,
        ref_model=reference,
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (model_logprobs[id(model)], case.entropy, None),
        _generate=lambda prompts: ([[5, 5]] * len(ids), ids, token_mask, ids, sampled, {}, None, None),
        _calculate_rewards=lambda *args: case.rewards[:, None],
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_funcs=[None],
        reward_func_names=["reward"],
        multi_objective_aggregation="sum_then_normalize",
        num_generations=case.group_size,
        num_iterations=2,  # more than one update per generation, so that TRL keeps old logprobs
        scale_rewards=scale or scale_of(name),
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=loss.off_policy_mask,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        loss_type="grpo" if name == "gspo" else name,
        beta=loss.kl_coef,
        epsilon_low=getattr(loss, "clip_low", None),
        epsilon_high=loss.clip_high + (name == "cispo") if isinstance(loss, RangedLoss) else None,
        use_vllm=True,
        vllm_importance_sampling_correction=loss.importance_correction != "none",
        vllm_importance_sampling_mode=loss.importance_correction,
        vllm_importance_sampling_clip_max=loss.importance_cap,
        vllm_importance_sampling_clip_min=loss.importance_floor,
        current_gradient_accumulation_steps=1,
        max_completion_length=case.max_new_tokens,
        _entropy_bonus_enabled=loss.entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=loss.entropy_coef,
        args=SimpleNamespace(
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            per_device_train_batch_size=len(case.lengths),
            gradient_checkpointing_kwargs=None,
            use_bias_correction_kl=loss.kl_importance_weight,
            delta=getattr(loss, "dual_clip", None),
            sapo_temperature_pos=getattr(loss, "tau_pos", None),
            sapo_temperature_neg=getattr(loss, "tau_neg", None),
        ),
    )


def trl_loss(
    trl, case, loss: PolicyGradientLoss, name: str, scale: str | None = None, **changes: Any
) -> tuple[Tensor, dict[str, Tensor], SimpleNamespace]:
    """TRL's loss with gradient, the inputs it made for it, and the stand-in with its metrics."""
    trainer = trl_stand_in(case, loss, name, scale)
    vars(trainer).update(changes, get_off_policy_mask=trl.get_off_policy_mask)
    trainer.get_high_entropy_mask = partial(trl.get_high_entropy_mask, trainer)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # TRL makes tensors of the sampler's logprobs in the default type
    try:
        inputs = trl._generate_and_score_completions(trainer, [{"prompt": "p"}] * len(case.lengths))
    finally:
        torch.set_default_dtype(dtype)
    return trl._compute_loss(trainer, None, inputs), inputs, trainer


def scale_of(name: str) -> str:
    return "none" if name == "dr_grpo" else "group"


def our_advantages(case, scale: str = "group") -> Tensor:
    groups = group_advantages(case.rewards.view(-1, case.group_size).tolist(), scale=scale)
    return torch.tensor(groups, dtype=torch.float64).flatten()  # [B]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_trl(trl, padded_case, name, variant):
    for seed in (0, 1):
        case = padded_case(seed)
        loss = build(name, variant)
        expected, _, _ = trl_loss(trl, case, loss, name)
        actual = loss(*case.flat(our_advantages(case, scale_of(name)))).loss
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
        grads = case.gradients(actual)
        torch.testing.assert_close(grads, case.gradients(expected), rtol=0, atol=1e-9)
        assert grads[0].abs().max() > 1e-3


def test_tokens_of_high_entropy_alone_equal_trl(trl, padded_case):
    case, frac = padded_case(0), 0.37  # the threshold lies between two tokens
    loss = build("grpo", "kl")
    expected, _, _ = trl_loss(trl, case, loss, "grpo", top_entropy_quantile=frac)
    policy, batch, totals = case.flat(our_advantages(case))
    actual = loss(policy, batch.with_top_entropy(policy.entropy.detach(), frac), totals).loss
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(case.gradients(actual), case.gradients(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(trl, padded_case, scale):
    case = padded_case(4, num_groups=3)
    _, inputs, _ = trl_loss(trl, case, build("grpo", "plain"), "grpo", scale)
    torch.testing.assert_close(our_advantages(case, scale), inputs["advantages"], rtol=0, atol=1e-12)


def test_gdpo_equals_trl(trl, padded_case):
    """Two parts of the reward: one does not differ in a group, and one has no value once."""
    case = padded_case(4, num_groups=3)
    rewards = torch.stack([case.rewards, 3 * case.rewards.roll(1)], dim=1)
    rewards[:4, 0], rewards[6, 1] = 0.3, torch.nan
    loss, ours = build("grpo", "plain"), GDPO({"b": 0.5})
    two = {"multi_objective_aggregation": "normalize_then_sum", "_calculate_rewards": lambda *_: rewards}
    two |= {"reward_weights": torch.tensor([1.0, 0.5]), "reward_funcs": [None] * 2, "reward_func_names": ["a", "b"]}
    _, inputs, _ = trl_loss(trl, case, loss, "grpo", **two)
    parts = [{name: x for name, x in zip("ab", row, strict=True) if x == x} for row in rewards.tolist()]
    rollouts = [replace(make_rollout([4], [3]), score=Score(0.0, False, own)) for own in parts]
    groups = [RolloutGroup(None, tuple(rollouts[first : first + 4])) for first in (0, 4, 8)]
    found = torch.tensor(ours(groups, build_batch(rollouts)), dtype=torch.float64).flatten()
    torch.testing.assert_close(found, inputs["advantages"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate", "token_mask", "sequence_mask"])
def test_importance_weights_equal_trl(trl, padded_case, correction):
    case = padded_case(1)
    loss = GRPO(**(PLAIN | LOSSES["grpo"][1] | {"importance_correction": correction, "importance_floor": 0.8}))
    _, inputs, _ = trl_loss(trl, case, loss, "grpo")
    expected = inputs["importance_sampling_ratio"].expand_as(case.mask)  # [B, C]
    metrics = loss(*case.flat(our_advantages(case))).metrics
    num_tokens = case.mask.sum()
    torch.testing.assert_close(metrics["importance_weight_mean"], (expected * case.mask).sum() / num_tokens)
    torch.testing.assert_close(metrics["importance_masked_frac"], ((expected == 0) * case.mask).sum() / num_tokens)
    assert not torch.allclose(expected, torch.exp(case.old_logprobs - case.rollout_logprobs))


def test_metrics_equal_trl(trl, padded_case):
    case = padded_case(2)
    loss = build("dapo", "kl")
    _, _, trainer = trl_loss(trl, case, loss, "dapo")
    metrics = loss(*case.flat(our_advantages(case))).metrics
    names = {
        "kl": "kl_divergence",
        "entropy": "entropy",
        "clip_ratio/low_mean": "clip_low_frac",
        "clip_ratio/high_mean": "clip_high_frac",
        "clip_ratio/region_mean": "clip_frac",
    }
    for trl_name, name in names.items():
        assert metrics[name].item() == pytest.approx(trainer._metrics["train"][trl_name][0], abs=1e-6)
        assert metrics[name] > 0
