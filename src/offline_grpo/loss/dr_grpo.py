"""Dr. GRPO: GRPO without its length bias, because every completion is divided by the same constant length (arXiv
2503.20783).

    loss = sum_t -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / (number of rollouts * max_new_tokens)

The paper's other change, advantages that are not divided by the group's std, is `train/advantage=group_mean`, which
conf/train/loss/dr_grpo.yaml chooses.

Departures from the paper: the constant is the generation limit, as in the authors' code (the paper leaves it open); a
KL term is available (the paper has none: `train.kl_coef=0`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offline_grpo.loss.base import ClippedLoss
from offline_grpo.types import BatchTotals, TokenBatch


@dataclass(frozen=True, kw_only=True)
class DrGRPO(ClippedLoss):
    """Clipped surrogate, sum over tokens divided by a constant length. See `ClippedLoss` for the settings."""

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return mask / (totals.num_rollouts * totals.max_new_tokens)
