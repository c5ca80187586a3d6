"""Logprobs of the tokens that are trained on: how far trainer and engine are apart, and where the updates push."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import TokenBatch

log = logging.getLogger(__name__)

MISMATCH_NATS = 0.1
"""A mean |trainer - engine| above this is no rounding: weights, dtype or sampling settings differ."""

MAX_LOG_WEIGHT = 300.0
"""In nats, of either sign: the square of such an importance weight still fits into float64, and is not 0."""


class Alignment:
    """Collects the microbatches of an iteration, once their `old_logprobs` are there."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, part: TokenBatch, policy_logprobs: torch.Tensor) -> None:
        """Count a microbatch, with the logprobs [T] of the policy in training. Does not wait for the device."""
        at = part.completion_positions  # [N]
        of_tokens = part.old_logprobs, part.rollout_logprobs, policy_logprobs, part.advantages
        ours, theirs, policy, advantages = (values.detach()[at].double() for values in of_tokens)
        difference = ours - theirs
        largest = difference.abs().max() if len(difference) else difference.new_zeros(())
        weights = difference.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
        terms = (
            torch.ones_like(ours),
            difference,
            difference.abs(),
            ours,
            ours.square(),
            theirs,
            theirs.square(),
            weights,
            weights.square(),
            (advantages > 0).double(),
            policy * (advantages > 0),
            (advantages < 0).double(),
            policy * (advantages < 0),
        )
        self._parts.append(torch.stack([*(term.sum() for term in terms), largest]))  # [14]

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over the tokens of all processes. Empty without tokens."""
        if not self._parts:
            return {}
        parts = torch.stack(self._parts).cpu()
        parts = parts[parts.isfinite().all(-1)]  # others belong to updates that were refused
        rows = ranks.gather([[*parts[:, :-1].sum(0).tolist(), max(parts[:, -1].tolist(), default=0.0)]])
        sums = [sum(column) for column in zip(*rows, strict=True)]
        count, diff, absolute, ours, ours_squared, theirs, theirs_squared, weights, weights_squared, *by_sign, _ = sums
        if count == 0:
            return {}
        found = {
            "alignment/diff_mean": diff / count,
            "alignment/diff_abs_mean": absolute / count,
            "alignment/diff_max": max(row[-1] for row in rows),
            "logprobs/training_mean": ours / count,
            "logprobs/training_std": _std(ours, ours_squared, count),
            "logprobs/inference_mean": theirs / count,
            "logprobs/inference_std": _std(theirs, theirs_squared, count),
            "mismatch/ess_frac": weights**2 / (count * weights_squared),  # Kish's effective sample size, per token
        }
        num_positive, positive, num_negative, negative = by_sign
        found |= {"pos_logp": positive / num_positive} if num_positive else {}
        found |= {"neg_logp": negative / num_negative} if num_negative else {}
        return found


def warn_of_mismatch(found: Mapping[str, float], above: float) -> float:
    """Say that trainer and engine disagree by more than `above`. Returns what the next warning must exceed."""
    difference = found.get("alignment/diff_abs_mean", 0.0)
    if difference <= above:
        return above
    log.warning(
        "[MISMATCH] trainer and engine differ by %.3f nats per token on average (alignment/diff_abs_mean, above %g); "
        "rollouts of other weights (rollouts=async, atropos or replay, weight_sync.interval) add to it; "
        "see docs/troubleshooting.md",
        difference,
        MISMATCH_NATS,
    )
    return 2 * difference


def _std(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(0.0, squares / count - (total / count) ** 2))
