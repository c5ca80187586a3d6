"""From scored groups to the batch that is trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, islice
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from offline_grpo.errors import ConfigError, ScoreError, require
from offline_grpo.train.batch import Passes, with_advantages
from offline_grpo.train.metrics import failures_of
from offline_grpo.types import FinishReason, Metrics, RolloutGroup, TokenBatch


class Experience(NamedTuple):
    """What an iteration learns from."""

    batch: TokenBatch | None  # with all that the updates need; None where nothing is left to train on
    advantages: list[list[float | None]]  # of every rollout; of those per token their mean, None without a reward
    metrics: Metrics
    groups: Sequence[RolloutGroup]  # as they were sampled, with the logprobs of a teacher


def prepare_batch(sampled: Sequence[RolloutGroup], passes: Passes, *, fills_updates: bool = False) -> Experience:
    """Make what an iteration learns from of its groups; every process makes the same. `fills_updates` keeps as many
    groups without signal as it takes to make as many updates as the whole batch would.
    """
    config, advantage = passes.config, passes.advantage
    metrics = {
        "num_groups": float(len(sampled)),
        "num_groups_replaced": float(sum(group.num_replaced for group in sampled)),
    }

    # 1. A teacher says how likely it finds every sampled token.
    if passes.teacher is not None:
        began = time.perf_counter()
        sampled = passes.teach(sampled)
        metrics["time/teacher_s"] = time.perf_counter() - began

    # 2. Rollouts without a reward are left out as if they had not been sampled; the others are one flat batch [T], also
    #    truncated completions that will not be trained on: they pay penalties, and count in the means of their groups.
    scored = [group.scored() for group in sampled]
    groups = [group for group in scored if group is not None]
    if len(groups) < len(sampled):
        metrics["num_groups_unscored"] = float(len(sampled) - len(groups))
    if not groups:
        nothing: list[list[float | None]] = [[None] * len(group.rollouts) for group in sampled]
        return Experience(None, nothing, metrics | {"num_groups_zero_signal": 0.0, "num_groups_trained": 0.0}, sampled)
    group_of = [number for number, group in enumerate(groups) for _ in group.rollouts]  # [R]
    rollouts = [rollout for group in groups for rollout in group.rollouts]  # [R]
    is_cut = [config.mask_truncated and rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts]  # [R]
    batch = passes.batch_of(rollouts)
    trained_mask = batch.completion_mask & ~torch.tensor(is_cut)[torch.tensor(batch.owners)][batch.sequence_ids]  # [T]

    # 3. The old policy and the reference score all of it, where rewards or advantages depend on what they say.
    is_scored = passes.reward_penalty is not None or bool(advantage.needs)
    if is_scored:
        batch = passes.score(batch)

    # 4. Rewards, less a KL penalty, become advantages: one number for each rollout, or one for each of its tokens.
    rewarded = groups
    if passes.reward_penalty is not None:
        fix = "these come with advantages, which no penalty on rewards changes; use train.loss.kl_placement=loss"
        require(all(group.advantages is None for group in groups), "train.loss.kl_placement", "reward", fix)
        penalties = passes.reward_penalty(batch).tolist()  # [R]
        metrics["kl_penalty_mean"] = fmean(penalties)
        lowered = (replace(r.score, reward=r.score.reward - less) for r, less in zip(rollouts, penalties, strict=True))
        rewarded = [group.with_scores(islice(lowered, len(group.rollouts))) for group in groups]
    # Those that a source brought along win over computed ones; a rollout with `zero_advantage` has none of either.
    advantages: list[float | Sequence[float]] = []  # [R]
    for group, computed in zip(groups, advantage(rewarded, replace(batch, completion_mask=trained_mask)), strict=True):
        for rollout, own in zip(group.rollouts, group.advantages or computed, strict=True):
            zero = 0.0 if group.advantages is None else (0.0,) * len(rollout.token_ids)
            advantages.append(zero if rollout.zero_advantage else own)
    pairs = zip(rollouts, advantages, strict=True)
    numbers = [[*compress(a, r.is_sampled)] if isinstance(a, Sequence) else [a] for r, a in pairs]  # [R][1 or sampled]
    # For the record: the mean of each sampled rollout, None for those that step 2 left out.
    means = iter([sum(own) / max(len(own), 1) for own in numbers])
    recorded = [
        [next(means) if own is not None and rollout.score.is_scored else None for rollout in group.rollouts]
        for group, own in zip(sampled, scored, strict=True)
    ]

    # 5. Groups without signal are dropped: all advantages are 0, or the advantage says that such rewards teach nothing.
    #    With `fills_updates` the first of them stay, until there are as many updates as without dropping.
    have_signal = {owner for owner, own in zip(group_of, numbers, strict=True) if any(own)}
    is_silent = [
        number not in have_signal or (group.advantages is None and advantage.is_silent(group))
        for number, group in enumerate(rewarded)
    ]
    keep = [not (silent and config.drop_zero_signal_groups) for silent in is_silent]
    if fills_updates:
        sizes = [len(group.rollouts) for group in groups]
        for number in range(len(groups)):
            left = sum(compress(sizes, keep))
            if (len(passes.updates_of(left)) if left else 0) < len(passes.updates_of(sum(sizes))):
                keep[number] = True
    whole = {owner for owner, cut in zip(group_of, is_cut, strict=True) if not cut}  # groups that are not all truncated
    kept = [number for number, is_kept in enumerate(keep) if is_kept]
    metrics["num_groups_zero_signal"] = float(sum(is_silent))
    metrics["num_groups_trained"] = float(len(whole.intersection(kept)))
    if config.mask_truncated:
        metrics["num_groups_masked"] = float(sum(not is_silent[number] for number in kept if number not in whole))

    # The batch shrinks to groups that are kept, its mask to tokens that are trained on; these get their advantages.
    chosen = [number for number, owner in enumerate(group_of) if keep[owner]]  # rollouts
    sequences = [sequence for sequence, owner in enumerate(batch.owners) if keep[group_of[owner]]]
    batch = batch.masked(trained_mask)
    batch = batch.select(sequences) if 0 < len(sequences) < batch.num_sequences else batch
    if not sequences or not bool(batch.completion_mask.any()):
        return Experience(None, recorded, metrics, sampled)
    batch = with_advantages(batch, [advantages[rollout] for rollout in chosen])
    counted = [number for rollout in chosen if not is_cut[rollout] for number in numbers[rollout]]
    metrics |= {
        "advantage_mean": fmean(counted),
        "advantage_std": float(np.std(counted)),
        "num_advantages_positive": float(sum(number > 0 for number in counted)),
        "num_advantages_negative": float(sum(number < 0 for number in counted)),
    }
    if batch.teacher_logprobs is not None:
        mask = batch.completion_mask
        metrics["distill/reverse_kl"] = (batch.rollout_logprobs - batch.teacher_logprobs)[mask].mean().item()
        metrics["distill/teacher_nll"] = -batch.teacher_logprobs[mask].mean().item()

    # 6. Old policy and reference score what is left, if they have not yet; tokens of low entropy lose their advantage.
    batch = batch if is_scored else passes.score(batch)
    if config.top_entropy_frac < 1:
        batch = batch.with_top_entropy(passes.values(passes.policy.scoring, batch, "entropy"), config.top_entropy_frac)
    return Experience(batch, recorded, metrics, sampled)


def check_groups(found: object) -> list[RolloutGroup]:
    """A source's groups. Raise ConfigError where `next` returned something else."""
    if not isinstance(found, list) or not all(isinstance(group, RolloutGroup) for group in found):
        raise ConfigError(f"rollouts: next() returned {found!r:.80}; it must return a list of types.RolloutGroup")
    return found


def check_scored(groups: Sequence[RolloutGroup], stop_at_frac: float | None) -> None:
    """Raise ScoreError if so many completions could not be scored that nothing can be learnt or said."""
    if stop_at_frac is None:
        return
    causes, num_rollouts = failures_of(groups), sum(len(group.rollouts) for group in groups)
    if causes and causes.total() >= stop_at_frac * num_rollouts:
        counts = ", ".join(f"{n} {cause}" for cause, n in causes.most_common())
        about = f"{causes.total()} of {num_rollouts} completions could not be scored ({counts})"
        raise ScoreError(f"{about}; scoring.stop_at_failed_frac={stop_at_frac:g}; run.log has the first of each cause")
