"""The project's updater on its own, without a run around it: what benchmarks of training time."""

from __future__ import annotations

from pathlib import Path

import torch

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain, composed, register, typed
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.train.advantage import GroupStd
from offline_grpo.train.batch import Passes
from offline_grpo.train.schedule import LrSchedule
from offline_grpo.train.sharding import Sharding
from offline_grpo.train.update import Updater


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
    register()
    words = f"""
        train/loss=dapo train.loss.clip_high={clip_high} train.loss.importance_correction=none train.kl_coef=0
        train.lr={lr} train.schedule=constant train.iterations=1 train.batch_size=null train.max_bad_updates=1
        train.precision={precision} train.dither_masters=false train.gradient_checkpointing={checkpointing}
        train.tokens_per_microbatch={tokens_per_microbatch}
    """
    cfg = composed(words.split())
    parts, config, device = as_plain(cfg)["train"], typed(cfg).train, policy.device.type
    ranks = Ranks(use_cpu=device == "cpu")
    passes = Passes(
        policy=policy,
        reference=None,
        loss=build(parts["loss"], key="train.loss"),
        advantage=GroupStd(),
        config=config,
        ranks=ranks,
        sharding=sharding or Sharding(ranks),
    )
    return Updater(
        passes=passes,
        optimizer=build(parts["optimizer"], key="train.optimizer").create(policy.make_masters().parameters.values()),
        scaler=torch.amp.GradScaler(device, enabled=False),  # type: ignore[attr-defined]
        max_new_tokens=max_new_tokens,
        lr_schedule=LrSchedule(kind="constant", num_updates=1, warmup_steps=0),
        seed=0,
        failure_dir=Path(),
    )
