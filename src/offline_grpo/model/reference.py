"""The frozen reference of the KL term: a second copy, or under LoRA the policy itself without its adapters."""

from __future__ import annotations

import torch

from offline_grpo.interfaces import Layout
from offline_grpo.model.device import resolve_device
from offline_grpo.model.dtypes import torch_dtype
from offline_grpo.model.load import load_causal_lm
from offline_grpo.model.logits import measure_logit_transform
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.scoring import BaseScoring, Scoring
from offline_grpo.settings import ModelConfig


def is_adapted_policy(config: ModelConfig) -> bool:
    """Whether the reference is what the policy is with its adapters switched off."""
    return config.lora is not None and config.ref_id in (None, config.train_id)


def load_reference(
    config: ModelConfig, model_id: str, policy: Policy, *, layout: Layout | None, precision: str
) -> Scoring | BaseScoring:
    """The frozen reference: the policy's own base model under LoRA, else a second copy in the same precision. Raises as
    `load_policy`.

    The copy is on `config.ref_device`.
    """
    reference_id = config.ref_id or model_id
    scoring = policy.scoring
    if is_adapted_policy(config):
        return BaseScoring(scoring)
    key, dtype = "model.ref_id", torch_dtype(precision)
    device = policy.device if config.ref_device is None else resolve_device(config.ref_device, key="model.ref_device")
    trust = config.trust_remote_code
    model = load_causal_lm(reference_id, config.attn_implementation, device, dtype, key=key, trust_remote_code=trust)
    model.requires_grad_(False)
    with torch.accelerator.device_index(device.index):
        reference = Scoring(model, scoring.layout, scoring.head, logits=measure_logit_transform(model, key=key))
        # What holds for one holds for the other, and is said once.
        is_like_policy = type(model) is type(policy.causal_lm) and device.type == policy.device.type
        settle_layout(reference, scoring.layout if is_like_policy else layout, device, key=key)
        settle_compile(reference, config.compile, device, key=key)
    return reference
