"""DPPO: a token is masked where its probability, not its ratio, has moved too far: unlikely tokens may change by a
large factor, likely ones only by a little (arXiv 2602.04879).

    loss = sum_t -m_t stop_gradient(min(r_t, ratio_cap)) A_t log policy_t / number of completion tokens

With p = policy and q = p / r of the sampled token, m_t is 0 where p has moved beyond a bound in the direction that A_t
favours (A_t > 0: up, clip_high; else down, clip_low), and 1 elsewhere. The distance is

    tv  |p - q|          kl  q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))

As in verl 0.9.1, `dppo_tv` and `dppo_kl`. Departures from the paper: a KL term is available (`train.kl_coef=0`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offline_grpo.loss import terms
from offline_grpo.loss.base import RangedLoss
from offline_grpo.loss.terms import Surrogate
from offline_grpo.types import BatchTotals, TokenBatch

EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class DPPO(RangedLoss):
    """Masked importance weight times logprob, mean over tokens. For other settings see `PolicyGradientLoss`."""

    divergence: Literal["tv", "kl"]
    ratio_cap: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("ratio_cap", self.ratio_cap >= 1, "must be 1, the ratio of equal weights, or more")

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
        # Constants: the probability of each token now, p, and before, q = p / ratio, both at most 1; [T].
        now, weight = logprobs.detach().clamp(max=0.0), ratio.detach()
        before = (now - weight.log()).clamp(max=0.0)
        p, q = now.exp(), before.exp()
        if self.divergence == "tv":
            distance = (p - q).abs()
        else:
            distance = q * (before - now) + (1 - q) * torch.log((1 - q + EPS) / (1 - p + EPS))
        # Masked where it has gone too far in the direction in which the advantage would push it on.
        is_low = (advantages < 0) & (p < q) & (distance > self.clip_low)
        is_high = (advantages > 0) & (p > q) & (distance > self.clip_high)
        loss = -weight.clamp(max=self.ratio_cap) * advantages * logprobs
        return Surrogate(loss.masked_fill(is_low | is_high, 0.0), is_low, is_high)

    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        return terms.token_mean_weights(mask, totals)
