"""SAPO: a soft gate in place of the clip, so that tokens lose weight smoothly the further the policy moves (arXiv
2511.20347).

    loss = mean_i mean_t -sigmoid(tau (r_it - 1)) 4 / tau A_i          tau = tau_pos where A_i > 0, else tau_neg

The gate's slope is 1 at a ratio of 1. A higher tau_neg damps tokens that are made less likely sooner.

Departures from the paper: a KL term is available (`train.kl_coef=0` switches it off).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offline_grpo.loss import terms
from offline_grpo.loss.base import PolicyGradientLoss
from offline_grpo.loss.terms import Surrogate
from offline_grpo.types import BatchTotals, TokenBatch


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyGradientLoss):
    """Gated ratio, mean over sequences of token means. No token counts as clipped. For other settings see
    `PolicyGradientLoss`.
    """

    tau_pos: float
    tau_neg: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("tau_pos", "tau_neg"):
            self._require(key, getattr(self, key) > 0, "must be above 0")

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
        # The gate rises with the ratio ever more slowly; 4 / tau makes its slope 1 at a ratio of 1. [T]
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        never = torch.zeros_like(advantages, dtype=torch.bool)
        return Surrogate(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages, never, never)

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return terms.sequence_mean_weights(mask, batch, totals)
