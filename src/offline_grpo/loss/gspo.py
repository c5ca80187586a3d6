"""GSPO: ratio and clipping apply to the whole completion (arXiv 2507.18071).

    s_i  = exp(mean_t log r_it)
    loss = mean_i -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

The gradient flows through the mean. Ratios of whole completions stay close to 1, so the clip range is about a thousand
times narrower than GRPO's.

Departures from the paper: a KL term is available (the paper drops it: `train.kl_coef=0`); `kl_importance_weight`
multiplies it by the sequence's ratio, as in TRL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offline_grpo.loss import terms
from offline_grpo.loss.base import ClippedLoss
from offline_grpo.types import BatchTotals, TokenBatch, TokenStats


@dataclass(frozen=True, kw_only=True)
class GSPO(ClippedLoss):
    """Clipped surrogate of length-normalised sequence ratios, mean over sequences. Settings: see `ClippedLoss`."""

    def ratio(self, log_ratio: Tensor, mask: Tensor, batch: TokenBatch) -> Tensor:
        # One ratio for a whole completion, the geometric mean of its tokens', which each of them then has.
        mean_log_ratio = terms.segment_mean(log_ratio, mask, batch)  # [S]
        return terms.bounded(mean_log_ratio).exp().index_select(0, batch.sequence_ids)  # [T]

    def times_ratio(self, kl: Tensor, ratio: Tensor, policy: TokenStats, batch: TokenBatch) -> Tensor:
        # A sequence's ratio is exp of its own logprob only where it has one token: there the exact gradient holds.
        of_sequences = terms.segment_sum(batch.completion_mask.to(kl.dtype), batch)  # [S]
        num_tokens = of_sequences.index_select(0, batch.sequence_ids)  # [T]
        of_one_token = super().times_ratio(kl, ratio, policy, batch)
        return torch.where(num_tokens == 1, of_one_token, kl * ratio)

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return terms.sequence_mean_weights(mask, batch, totals)
