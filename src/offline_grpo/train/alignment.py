"""How far trainer and engine are apart on the tokens that are trained on: the same weights should give the same logprobs."""

from __future__ import annotations

import logging
import math

import torch

from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import TokenBatch

log = logging.getLogger(__name__)

MISMATCH_NATS = 0.1
"""A mean |trainer - engine| above this is no rounding: weights, dtype or sampling settings differ."""


class Alignment:
    """Collects the microbatches of an iteration, once their `old_logprobs` are there."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, part: TokenBatch) -> None:
        """Count a microbatch. Does not wait for the device."""
        ours, theirs = (values[part.completion_mask].double() for values in (part.old_logprobs.detach(), part.rollout_logprobs))  # [N]
        difference = ours - theirs
        largest = difference.abs().max() if len(difference) else difference.new_zeros(())
        terms = (torch.ones_like(ours), difference, difference.abs(), ours, ours.square(), theirs, theirs.square())
        self._parts.append(torch.stack([*(term.sum() for term in terms), largest]))  # [8]

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over the tokens of all processes; logs a warning where trainer and engine disagree. Empty without tokens."""
        if not self._parts:
            return {}
        parts = torch.stack(self._parts).cpu()
        parts = parts[parts.isfinite().all(-1)]  # others belong to updates that were refused
        rows = ranks.gather([[*parts[:, :7].sum(0).tolist(), max(parts[:, 7].tolist(), default=0.0)]])
        count, diff, absolute, ours, ours_squared, theirs, theirs_squared = (sum(row[i] for row in rows) for i in range(7))
        if count == 0:
            return {}
        found = {
            "alignment/diff_mean": diff / count,
            "alignment/diff_abs_mean": absolute / count,
            "alignment/diff_max": max(row[7] for row in rows),
            "logprobs/training_mean": ours / count,
            "logprobs/training_std": _std(ours, ours_squared, count),
            "logprobs/inference_mean": theirs / count,
            "logprobs/inference_std": _std(theirs, theirs_squared, count),
        }
        if found["alignment/diff_abs_mean"] > MISMATCH_NATS and ranks.is_main:
            log.warning(
                "[MISMATCH] trainer and engine differ by %.3f nats per token on average (alignment/diff_abs_mean, above %g); "
                "see docs/troubleshooting.md",
                found["alignment/diff_abs_mean"],
                MISMATCH_NATS,
            )
        return found


def _std(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(0.0, squares / count - (total / count) ** 2))
