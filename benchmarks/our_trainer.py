"""The project's updater on its own, without a run around it: what benchmarks of training time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offline_grpo.config.compose import composed, register, typed
from offline_grpo.config.parts import Plan, make_plan
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.start import model
from offline_grpo.train.sharding import Sharding
from offline_grpo.train.update import Updater


def updater_of(plan: Plan, policy: Policy, sharding: Sharding) -> Updater:
    """That of a run with this plan, which has no KL term, and with a policy that has its masters."""
    run = {"plan": plan, "policy": policy, "sharding": sharding, "ranks": sharding.ranks, "resume": None}
    made: Any = SimpleNamespace(**run, folder=SimpleNamespace(path=Path()))
    return model.make_updater(made)


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
        train.tokens_per_microbatch={tokens_per_microbatch} generation.max_new_tokens={max_new_tokens}
    """
    plan = make_plan(typed(composed(words.split())))
    policy.make_masters()
    return updater_of(plan, policy, sharding or Sharding(Ranks(use_cpu=policy.device.type == "cpu")))
