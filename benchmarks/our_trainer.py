"""The project's updater on its own, without a run around it: what benchmarks of training time."""

from __future__ import annotations

from pathlib import Path

import torch

from offline_grpo.loss.dapo import DAPO
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import StopWhenConfig, TrainConfig
from offline_grpo.train.advantage import GroupStd
from offline_grpo.train.optimizer import AdamW
from offline_grpo.train.passes import Passes
from offline_grpo.train.schedule import LrSchedule
from offline_grpo.train.sharding import Sharding
from offline_grpo.train.update import Updater

ADAMW = {"lr": 1e-6, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def make_updater(
    policy: Policy,
    *,
    precision: str,
    tokens_per_microbatch: int,
    max_new_tokens: int,
    lr: float,
    clip_high: float,
    checkpointing: bool,
    sharding: Sharding | None = None,
) -> Updater:
    """One update on all sequences, by DAPO's loss without KL and AdamW; the policy's own logprobs are the old ones.

    Args:
        sharding: has prepared the policy; None: each process has the whole.
    """
    config = TrainConfig(
        sharding="none",
        iterations=1,
        stop_when=StopWhenConfig("pass@1", None, None),
        updates_per_iteration=1,
        epochs=1,
        batch_size=None,
        tokens_per_microbatch=tokens_per_microbatch,
        grad_accum_steps=None,
        lr=lr,
        weight_decay=0.0,
        warmup_steps=0,
        schedule="constant",
        grad_clip=1.0,
        kl_coef=0.0,
        entropy_coef=0.0,
        precision=precision,
        dither_masters=False,
        gradient_checkpointing=checkpointing,
        train_layer_indices=None,
        mask_truncated=False,
        top_entropy_frac=1.0,
        drop_zero_signal_groups=True,
        max_bad_updates=1,
        profile=None,
        advantage=None,
        loss=None,
        optimizer=None,
    )
    loss = DAPO(
        clip_low=0.2,
        clip_high=clip_high,
        dual_clip=None,
        ratio_reference="old",
        kl_coef=0.0,
        kl_estimator="k3",
        kl_placement="loss",
        kl_importance_weight=True,
        entropy_coef=0.0,
        importance_correction="none",
        importance_cap=2.0,
        importance_floor=0.0,
        off_policy_mask=None,
        geometric_bounds=None,
    )
    device = policy.device.type
    ranks = Ranks(use_cpu=device == "cpu")
    passes = Passes(
        policy=policy,
        reference=None,
        loss=loss,
        advantage=GroupStd(),
        config=config,
        ranks=ranks,
        sharding=sharding or Sharding(ranks),
    )
    return Updater(
        passes=passes,
        optimizer=AdamW(**ADAMW | {"lr": lr}, offload=False).create(policy.make_masters().parameters.values()),
        scaler=torch.amp.GradScaler(device, enabled=False),  # type: ignore[attr-defined]
        max_new_tokens=max_new_tokens,
        lr_schedule=LrSchedule(kind="constant", num_updates=1, warmup_steps=0),
        seed=0,
        failure_dir=Path(),
    )
