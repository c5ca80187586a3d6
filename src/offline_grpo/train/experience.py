"""From scored groups to the batch that is trained on: KL in the reward, advantages, groups without signal, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from offline_grpo.settings import TrainConfig
from offline_grpo.train.advantage import group_advantages, zero_signal_groups
from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.train.update import Updater
from offline_grpo.types import FinishReason, RolloutGroup, TokenBatch


def prepare_batch(
    groups: Sequence[RolloutGroup], updater: Updater, config: TrainConfig, *, temperature: float
) -> tuple[TokenBatch | None, dict[str, float]]:
    """The batch of an iteration, scored by the policy and the reference where it needs that, and metrics of its advantages.

    None in place of a batch where no group is left to train on.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [[rollout.score.reward for rollout in group.rollouts] for group in groups]
    batch = build_batch(rollouts, temperature=temperature, mask_truncated=config.mask_truncated)
    metrics: dict[str, float] = {}
    if updater.loss.kl_in_reward:
        batch = updater.score(batch)
        penalties = updater.loss.reward_penalties(batch).tolist()
        rewards = _subtract(rewards, penalties)
        metrics["kl_penalty_mean"] = fmean(penalties)
    advantages = group_advantages(rewards, scale=updater.loss.scale_rewards)
    is_silent = zero_signal_groups(advantages)
    keep = [not (config.drop_zero_signal_groups and silent) for silent in is_silent]
    metrics |= {"num_groups": float(len(groups)), "num_groups_zero_signal": float(sum(is_silent)), "num_groups_trained": float(sum(keep))}
    flat = [advantage for group, kept in zip(advantages, keep, strict=True) for advantage in group if kept]
    chosen = _sequences_of_groups(groups, keep)
    if not chosen or not bool(batch.completion_mask.any()):
        return None, metrics
    batch = with_advantages(batch.select(chosen) if len(chosen) < batch.num_sequences else batch, flat)
    metrics |= {"advantage_mean": fmean(flat), "advantage_std": pstdev(flat)}
    return batch if updater.loss.kl_in_reward else updater.score(batch), metrics


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What the sampled completions of an iteration were like, before anything is dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.score.reward for r in rollouts]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    parts = sorted({name for r in rollouts for name in r.score.parts})
    return {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "success_rate": fmean(r.score.is_correct for r in rollouts),
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "num_completion_tokens": float(sum(lengths)),
        "truncated_frac": fmean(r.completion.finish_reason is FinishReason.LENGTH for r in rollouts),
        **{f"reward/{name}": fmean(r.score.parts.get(name, 0.0) for r in rollouts) for name in parts},
    }


def _subtract(rewards: list[list[float]], penalties: list[float]) -> list[list[float]]:
    remaining = iter(penalties)
    return [[reward - next(remaining) for reward in group] for group in rewards]


def _sequences_of_groups(groups: Sequence[RolloutGroup], keep: Sequence[bool]) -> list[int]:
    owner_is_kept = [kept for group, kept in zip(groups, keep, strict=True) for _ in group.rollouts]
    return [sequence for sequence, kept in enumerate(owner_is_kept) if kept]
