"""GRPO: the clipped surrogate, averaged over the tokens of each completion and then over completions (arXiv
2402.03300).

    loss = mean_i mean_t -min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) + kl_coef * mean_i mean_t KL_it

The surrogate is DAPO's with equal clips; the aggregation differs. Short completions weigh as much as long ones, so each
of their tokens weighs more.

Departures from the paper: the KL estimate can be multiplied by the ratio (`kl_importance_weight`), and the surrogate by
the weight that corrects for the engine (`importance_correction`); the mean is over the completions of the optimizer
batch, whatever their group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offline_grpo.loss import terms
from offline_grpo.loss.base import ClippedLoss
from offline_grpo.types import BatchTotals, TokenBatch


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedLoss):
    """Clipped surrogate, mean over sequences of token means. See `ClippedLoss` for the settings."""

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return terms.sequence_mean_weights(mask, batch, totals)
