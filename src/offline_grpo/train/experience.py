"""From scored groups to the batch that is trained on: KL in the reward, advantages, groups without signal, logprobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from math import sqrt
from statistics import fmean

import numpy as np

from offline_grpo.errors import ConfigError, ScoreError, require
from offline_grpo.settings import TrainConfig
from offline_grpo.train.advantage import group_advantages, rewards_of, zero_signal_groups
from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.train.update import Updater
from offline_grpo.types import FinishReason, Rollout, RolloutGroup, TokenBatch, by_task

Advantages = Sequence[float | Sequence[float]]
"""Of a group: one number per rollout, or per rollout one for each of its tokens."""


def prepare_batch(
    sampled: Sequence[RolloutGroup], updater: Updater, config: TrainConfig, *, fills_updates: bool = False
) -> tuple[TokenBatch | None, list[list[float | None]], dict[str, float]]:
    """The batch of an iteration, scored by the policy and the reference where it needs that; the advantage of every
    rollout of every group (of advantages per token their mean; None without a reward); and metrics. The batch is None
    where no group is left. Rollouts without a reward are left out as if they had not been sampled.

    Args:
        fills_updates: see `_keep`.
    """
    groups = [group for group in map(RolloutGroup.scored, sampled) if group is not None]
    metrics = {
        "num_groups": float(len(sampled)),
        "num_groups_replaced": float(sum(group.num_replaced for group in sampled)),
    }
    if len(groups) < len(sampled):
        metrics["num_groups_unscored"] = float(len(sampled) - len(groups))
    if not groups:
        return None, _of_all(sampled, []), metrics | {"num_groups_zero_signal": 0.0, "num_groups_trained": 0.0}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    batch = build_batch(rollouts, mask_truncated=config.mask_truncated)
    penalised = groups
    has_logprobs = updater.reward_penalty is not None or bool(updater.advantage.needs)
    whole = batch
    if has_logprobs:  # truncated completions too: they pay their penalty
        whole = updater.score(build_batch(rollouts, mask_truncated=False))
        mask, ref = batch.completion_mask, whole.ref_logprobs
        batch = batch.with_logprobs(old=whole.old_logprobs * mask, ref=None if ref is None else ref * mask)
    if updater.reward_penalty is not None:
        fix = "these come with advantages, which no penalty on rewards changes; use train.loss.kl_placement=loss"
        require(all(group.advantages is None for group in groups), "train.loss.kl_placement", "reward", fix)
        penalties = updater.reward_penalty(whole).tolist()
        penalised = _subtract(groups, penalties)
        metrics["kl_penalty_mean"] = fmean(penalties)
    computed = updater.advantage(penalised, batch)
    advantages = [_without_zeroed(g, g.advantages or own) for g, own in zip(groups, computed, strict=True)]
    per_rollout = [_per_rollout(group, own) for group, own in zip(groups, advantages, strict=True)]
    is_zero = zero_signal_groups([_numbers(group, own) for group, own in zip(groups, advantages, strict=True)])
    is_silent = [
        zero or (group.advantages is None and updater.advantage.is_silent(group))
        for zero, group in zip(is_zero, penalised, strict=True)
    ]
    keep = [True] * len(groups)
    if config.drop_zero_signal_groups:
        keep = _keep(groups, is_silent, updater, fills_updates=fills_updates)
    kept = [number for number, is_kept in enumerate(keep) if is_kept]
    are_cut = [all(r.finish_reason is FinishReason.LENGTH for r in group.rollouts) for group in groups]
    masked = [number for number in kept if config.mask_truncated and are_cut[number]]
    metrics |= {
        "num_groups_zero_signal": float(sum(is_silent)),
        "num_groups_trained": float(len(kept) - len(masked)),
    }
    if config.mask_truncated:
        metrics["num_groups_masked"] = float(sum(not is_silent[number] for number in masked))
    owners = [number for number, group in enumerate(groups) for _ in group.rollouts]
    sequences = [sequence for sequence, owner in enumerate(owners) if keep[owner]]
    batch = batch.select(sequences) if 0 < len(sequences) < batch.num_sequences else batch
    of_all = _of_all(sampled, per_rollout)
    if not sequences or not bool(batch.completion_mask.any()):
        return None, of_all, metrics
    batch = with_advantages(batch, [advantage for number in kept for advantage in advantages[number]])
    of_groups = [_numbers(groups[n], advantages[n], mask_truncated=config.mask_truncated) for n in kept]
    numbers = [number for own in of_groups for number in own]
    metrics |= {
        "advantage_mean": fmean(numbers),
        "advantage_std": float(np.std(numbers)),
        "num_advantages_positive": float(sum(n > 0 for n in numbers)),
        "num_advantages_negative": float(sum(n < 0 for n in numbers)),
    }
    if batch.teacher_logprobs is not None:
        mask = batch.completion_mask
        metrics["distill/reverse_kl"] = (batch.rollout_logprobs - batch.teacher_logprobs)[mask].mean().item()
        metrics["distill/teacher_nll"] = -batch.teacher_logprobs[mask].mean().item()
    batch = batch if has_logprobs else updater.score(batch)
    return updater.with_top_entropy(batch), of_all, metrics


def check_groups(found: object) -> list[RolloutGroup]:
    """A source's groups. Raise ConfigError where `next` returned something else."""
    if not isinstance(found, list) or not all(isinstance(group, RolloutGroup) for group in found):
        raise ConfigError(f"rollouts: next() returned {found!r:.80}; it must return a list of types.RolloutGroup")
    return found


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics of an iteration's completions before anything is dropped; of a mixture, also of each task by itself.

    Raises:
        ConfigError: there is no group, of any process.
    """
    require(bool(groups), "rollouts", "[]", "next() returned nothing to train on; it must return a group or more")
    shown = ("reward_mean", "success_rate", "completion_tokens_mean", "truncated_frac")
    of_tasks = {name: _rollout_means(own) for name, own in by_task(groups).items()}
    return _rollout_means(groups) | {
        f"task/{name}/{key}": value
        for name, own in of_tasks.items()
        for key, value in own.items()
        if key in shown or key.startswith("reward/")
    }


def _rollout_means(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [r.score for r in rollouts if r.score.is_scored]
    rewards = [score.reward for score in scores]
    lengths = [r.num_sampled for r in rollouts]
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(name, []).append(value)
    of_scored: dict[str, float] = {}
    if scores:
        success = fmean(score.is_correct for score in scores)
        of_scored = {"reward_mean": fmean(rewards), "reward_std": float(np.std(rewards)), "success_rate": success}
    reasons = [r.finish_reason for r in rollouts if r.finish_reason is not None]
    return {
        **of_scored,
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "num_completion_tokens": float(sum(lengths) + sum(group.num_discarded_tokens for group in groups)),
        **({"truncated_frac": fmean(reason is FinishReason.LENGTH for reason in reasons)} if reasons else {}),
        **{f"reward/{name}": fmean(values) for name, values in sorted(parts.items())},
        **_reward_against_length([group for group in map(RolloutGroup.scored, groups) if group is not None]),
        **score_metrics(groups),
    }


def _reward_against_length(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Pearson's correlation over all rollouts, each less the mean of its group; empty where one does not vary."""
    rewards = group_advantages(rewards_of(groups), scale="none")
    lengths = group_advantages([[float(r.num_sampled) for r in group.rollouts] for group in groups], scale="none")
    if not groups:
        return {}
    x, y = np.concatenate(rewards), np.concatenate(lengths)  # 0 where they differ by rounding
    spread = sqrt((x @ x) * (y @ y))
    return {"reward_length_correlation": float(x @ y) / spread} if spread > 0 else {}


def score_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """How many completions could not be scored, also of each cause; and the means of what the task measured."""
    failures = _failures(groups)
    measured: dict[str, list[float]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for name, value in rollout.score.measured.items():
            measured.setdefault(name, []).append(value)
    return {
        **{f"measured/{name}": fmean(values) for name, values in sorted(measured.items())},
        "scoring/num_failed": float(len(failures)),
        **{f"scoring/num_failed_{cause}": float(n) for cause, n in Counter(failures).items()},
    }


def check_scored(groups: Sequence[RolloutGroup], stop_at_frac: float | None) -> None:
    """Raise ScoreError if so many completions could not be scored that nothing can be learnt or said."""
    if stop_at_frac is None:
        return
    failures, num_rollouts = _failures(groups), sum(len(group.rollouts) for group in groups)
    if failures and len(failures) >= stop_at_frac * num_rollouts:
        causes = ", ".join(f"{n} {cause}" for cause, n in Counter(failures).most_common())
        about = f"{len(failures)} of {num_rollouts} completions could not be scored ({causes})"
        raise ScoreError(f"{about}; scoring.stop_at_failed_frac={stop_at_frac:g}; run.log has the first of each cause")


def _failures(groups: Sequence[RolloutGroup]) -> list[str]:
    scores = [rollout.score for group in groups for rollout in group.rollouts]
    return [score.failure.partition(":")[0] for score in scores if score.failure is not None]


def _without_zeroed(group: RolloutGroup, advantages: Advantages) -> list[float | Sequence[float]]:
    pairs = zip(group.rollouts, advantages, strict=True)
    zeros = [0.0 if group.advantages is None else (0.0,) * len(rollout.token_ids) for rollout in group.rollouts]
    return [zero if rollout.zero_advantage else own for (rollout, own), zero in zip(pairs, zeros, strict=True)]


def _numbers(group: RolloutGroup, advantages: Advantages, *, mask_truncated: bool = False) -> list[float]:
    """A group's advantages: one per rollout, or those of its sampled tokens. `mask_truncated`: as in `build_batch`."""
    found: list[float] = []
    for rollout, own in zip(group.rollouts, advantages, strict=True):
        if not (mask_truncated and rollout.finish_reason is FinishReason.LENGTH):
            found += compress(own, rollout.is_sampled) if isinstance(own, Sequence) else (own,)
    return found


def _per_rollout(group: RolloutGroup, advantages: Advantages) -> list[float]:
    """One number per rollout: its advantage, or the mean of those of its sampled tokens."""
    return [
        sum(compress(own, r.is_sampled)) / max(r.num_sampled, 1) if isinstance(own, Sequence) else own
        for own, r in zip(advantages, group.rollouts, strict=True)
    ]


def _of_all(sampled: Sequence[RolloutGroup], scored: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """The numbers of the rollouts that are used, in a list for all of them: None of the others."""
    remaining = iter([number for own in scored for number in own])
    return [
        [next(remaining) if is_used and rollout.score.is_scored else None for rollout in group.rollouts]
        for group in sampled
        for is_used in (group.scored() is not None,)
    ]


def _keep(
    groups: Sequence[RolloutGroup], is_silent: Sequence[bool], updater: Updater, *, fills_updates: bool
) -> list[bool]:
    """Which groups are trained on, where those without signal are dropped. With `fills_updates` as many of them stay,
    the first, as it takes to make the updates that the whole batch would make.
    """
    keep, sizes = [not silent for silent in is_silent], [len(group.rollouts) for group in groups]
    planned = len(updater.updates_of(sum(sizes))) if fills_updates else 0
    for number, silent in enumerate(is_silent):
        left = sum(compress(sizes, keep))
        if silent and (len(updater.updates_of(left)) if left else 0) < planned:
            keep[number] = True
    return keep


def _subtract(groups: Sequence[RolloutGroup], penalties: Sequence[float]) -> list[RolloutGroup]:
    remaining = iter(penalties)

    def lowered(rollout: Rollout) -> Rollout:
        return replace(rollout, score=replace(rollout.score, reward=rollout.score.reward - next(remaining)))

    return [replace(group, rollouts=tuple(map(lowered, group.rollouts))) for group in groups]
