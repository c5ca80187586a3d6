"""CISPO: REINFORCE with a clipped importance weight that carries no gradient, so every token keeps its own (MiniMax-M1,
arXiv 2506.13585).

    loss = sum_t -stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log policy_t / number of completion tokens

The bounds are deltas, as in the paper and in verl. TRL's `epsilon_high` is the bound itself, so its 5.0 is `clip_high:
4.0` here. With `clip_low: 1.0` the lower bound is 0 and never applies; this is the paper's choice and the only one that
TRL offers.

Departures from the paper: a KL term is available (the paper has none: `train.kl_coef=0`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offline_grpo.loss import terms
from offline_grpo.loss.base import RangedLoss
from offline_grpo.loss.terms import Surrogate
from offline_grpo.types import BatchTotals, TokenBatch


@dataclass(frozen=True, kw_only=True)
class CISPO(RangedLoss):
    """Clipped importance weight times logprob, mean over tokens. See `RangedLoss` for the settings. The clip
    fractions count clipped weights, for both signs of the advantage: their gradient is scaled, not removed.
    """

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
        # The clipped ratio is a constant weight, so that a clipped token keeps its gradient: that of its logprob. [T]
        low, high = 1 - self.clip_low, 1 + self.clip_high
        has_signal = advantages != 0
        loss = -ratio.detach().clamp(low, high) * advantages * logprobs
        return Surrogate(loss, (ratio < low) & has_signal, (ratio > high) & has_signal)

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return terms.token_mean_weights(mask, totals)
