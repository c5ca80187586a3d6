"""DAPO: every completion token of the batch has the same weight, and the upper clip bound may be wider (arXiv
2503.14476).

    loss = sum_t -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / number of completion tokens

Departures from the paper: A KL term is available (the paper has none: `train.kl_coef=0`). Dynamic sampling and overlong
reward shaping concern the rollouts, not the loss. The paper averages over the tokens of one prompt's group and then
over prompts; this loss averages over the tokens of the optimizer batch, as TRL and verl do.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offline_grpo.loss import terms
from offline_grpo.loss.base import ClippedLoss
from offline_grpo.types import BatchTotals, TokenBatch


@dataclass(frozen=True, kw_only=True)
class DAPO(ClippedLoss):
    """Clipped surrogate, mean over tokens. See `ClippedLoss` for the settings."""

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return terms.token_mean_weights(mask, totals)
