"""The common part of all policy-gradient losses: settings, combination of the terms, and metrics.

    loss = pg + kl_coef * kl - entropy_coef * entropy
    pg   = sum_t weight[t] * importance[t] * surrogate[t]      kl = sum_t weight[t] * (ratio[t] *) kl_estimate[t]

Each loss implements `surrogate` and `weights` (its aggregation), and overrides `ratio` if the ratio is not per token.
The terms and their weights follow TRL 1.16 `GRPOTrainer._compute_loss`; the equivalence tests compare values and
gradients with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Loss
from offline_grpo.loss import terms
from offline_grpo.loss.terms import Surrogate
from offline_grpo.types import BatchTotals, LossOutput, TokenBatch, TokenStats


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss(ABC):
    """A policy-gradient loss over flat tokens. Called on a microbatch, it returns its share (see `LossOutput`).

    conf/train/loss/_shared.yaml explains the settings; ranges are checked here, and choices by `build`. Without
    `kl_importance_weight` the gradient of k3 is not that of the KL (DeepSeek-V3.2, arXiv 2512.02556).
    """

    ratio_reference: Literal["old", "rollout"]
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_placement: Literal["loss", "reward"]
    kl_importance_weight: bool
    entropy_coef: float
    importance_correction: Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
    importance_cap: float
    importance_floor: float
    off_policy_mask: float | None
    geometric_bounds: list[float] | None

    def __post_init__(self) -> None:
        # Ranges of numbers; then the two ways to correct for the engine, which exclude each other.
        for key in ("kl_coef", "entropy_coef"):
            self._require(key, getattr(self, key) >= 0, "must be 0 or more")
        self._require("importance_cap", self.importance_cap >= 1, "must be 1, the ratio of equal weights, or more")
        self._require("importance_floor", 0 <= self.importance_floor <= 1, "must be in [0, 1]")
        threshold, bounds = self.off_policy_mask, self.geometric_bounds
        self._require("off_policy_mask", threshold is None or threshold > 0, "nats per token, above 0, or null")
        is_range = bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1])
        self._require(
            "geometric_bounds", is_range, "the lowest and the highest, around 1, such as [0.99,1.01], or null"
        )
        is_corrected_once = self.ratio_reference == "old" or self.importance_correction == "none"
        fix = "train.loss.ratio_reference=rollout corrects for the engine already; use none"
        self._require("importance_correction", is_corrected_once, fix)

    @abstractmethod
    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
        """The policy-gradient loss of each token [T], from its ratio, logprob and advantage, all [T]."""

    @abstractmethod
    def weights(self, mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
        """The weight of each token [T] in the loss, 0 outside the completion `mask` (0.0 / 1.0, [T]); no gradient."""

    def ratio(self, log_ratio: Tensor, mask: Tensor, batch: TokenBatch) -> Tensor:
        """The ratio [T], from per-token log-ratios [T] that are 0 outside the completion `mask` [T]."""
        return terms.bounded(log_ratio).exp()

    def times_ratio(self, kl: Tensor, ratio: Tensor, policy: TokenStats, batch: TokenBatch) -> Tensor:
        """KL estimates times the ratio, [T]. For a ratio per token, see `terms.k3_times_ratio`."""
        if self.kl_estimator != "k3" or batch.ref_logprobs is None:
            return kl * ratio
        return terms.k3_times_ratio(policy.logprobs, batch.ref_logprobs, ratio)

    def __call__(self, policy: TokenStats, batch: TokenBatch, totals: BatchTotals) -> LossOutput:
        """This microbatch's share of the loss and metrics of the optimizer batch that `totals` describes.

        Raises:
            ConfigError: the surrogate, the ratio or the weights of a subclass are not one number for each token.
            ValueError: the loss has a KL term but the batch has no `ref_logprobs`.
        """
        # How each token counts in the loss, and in means over the completion tokens of the whole optimizer batch.
        mask = batch.completion_mask.to(policy.logprobs.dtype)  # [T]
        weights = self.weights(mask, batch, totals)  # [T]
        token_mean = terms.token_mean_weights(mask, totals)  # [T]

        # How far the policy has moved from what its tokens were sampled with, and what that is worth under the
        # advantage; the policy's own logprobs alone carry a gradient.
        reference = batch.old_logprobs if self.ratio_reference == "old" else batch.rollout_logprobs  # [T]
        ratio = self.ratio((policy.logprobs - reference) * mask, mask, batch)  # [T]
        self._need_one_per_token(policy.logprobs, weights=weights, ratio=ratio)
        surrogate = self.surrogate(ratio, policy.logprobs, batch.advantages)
        self._need_one_per_token(policy.logprobs, surrogate=surrogate.loss)

        # What corrects for the engine is a constant factor of the surrogate: 0 leaves a token out.
        importance = terms.importance_weights(
            batch, mask, correction=self.importance_correction, cap=self.importance_cap, floor=self.importance_floor
        )  # [T]
        if self.off_policy_mask is not None:
            importance = importance * terms.off_policy_mask(policy.logprobs, batch, mask, self.off_policy_mask)
        if self.geometric_bounds is not None:
            importance = importance * terms.geometric_mask(batch, mask, *self.geometric_bounds)

        # The KL to the reference, [T]; without one it is not measured: 0 would claim that policy and reference are
        # equal. Where rewards pay for it, it is a metric alone.
        kl = None
        if batch.ref_logprobs is not None:
            kl = terms.kl_estimate(policy.logprobs, batch.ref_logprobs, self.kl_estimator)
        elif self.kl_coef > 0 and self.kl_placement == "loss":
            raise ValueError(f"kl_coef is {self.kl_coef} but the batch has no ref_logprobs")

        # The loss: this microbatch's share of each term. The entropy bonus is a mean over tokens for every aggregation.
        loss_pg = (weights * importance * surrogate.loss).sum()
        loss_kl, loss_entropy = weights.new_zeros(()), token_mean.new_zeros(())
        if kl is not None and self.kl_coef != 0 and self.kl_placement == "loss":
            weighted = self.times_ratio(kl, ratio, policy, batch) if self.kl_importance_weight else kl
            loss_kl = self.kl_coef * (weights * weighted).sum()
        if self.entropy_coef != 0:
            loss_entropy = -self.entropy_coef * (token_mean * policy.entropy).sum()
        loss = loss_pg + loss_kl + loss_entropy

        # The metrics: the terms themselves, and shares of means over completion tokens.
        scalars = {"loss_total": loss, "loss_pg": loss_pg, "loss_kl": loss_kl, "loss_entropy": loss_entropy}
        per_token = {
            "entropy": policy.entropy,
            "ratio_mean": ratio,
            "clip_frac": surrogate.is_clipped_low | surrogate.is_clipped_high,
            "clip_low_frac": surrogate.is_clipped_low,
            "clip_high_frac": surrogate.is_clipped_high,
            "importance_weight_mean": importance,
            "importance_masked_frac": importance == 0,
            **terms.mismatch(batch),
        }
        if kl is not None:
            per_token["kl_divergence"] = kl
        means = {name: (token_mean * values.detach()).sum() for name, values in per_token.items()}
        return LossOutput(loss=loss, metrics={name: value.detach() for name, value in scalars.items()} | means)

    def _need_one_per_token(self, logprobs: Tensor, **found: Tensor) -> None:
        """Raise ConfigError if a user's method sums or averages: its result would be spread over all tokens."""
        for name, values in found.items():
            if values.shape != logprobs.shape:
                shapes = f"has the shape {[*values.shape]} and must be one number for each token, {[*logprobs.shape]}"
                method = f"{type(self).__name__}.{name}()"
                raise ConfigError(f"train.loss: what {method} returns {shapes}; weights() says how they are averaged")

    def _require(self, key: str, is_valid: bool, fix: str) -> None:
        require(is_valid, f"train.loss.{key}", getattr(self, key), fix)


@dataclass(frozen=True, kw_only=True)
class RangedLoss(PolicyGradientLoss, ABC):
    """A loss that limits how far the policy moves: the range of the ratio is [1 - clip_low, 1 + clip_high]."""

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("clip_low", 0 <= self.clip_low <= 1, "must be in [0, 1]")
        self._require("clip_high", self.clip_high >= 0, "must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(RangedLoss, ABC):
    """A loss with PPO's clipped surrogate (see `terms.clipped_surrogate`); subclasses choose the aggregation."""

    dual_clip: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        above = 1 + self.clip_high
        is_above = self.dual_clip is None or self.dual_clip > above
        self._require("dual_clip", is_above, f"must be null or above 1 + clip_high = {above:g}")

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
        return terms.clipped_surrogate(
            ratio, advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )


def reward_penalty(loss: Loss) -> Callable[[TokenBatch], Tensor] | None:
    """What `kl_placement=reward` subtracts from the rewards, [R]: `kl_coef` times the sum of a rollout's KL estimates
    (of `old_logprobs` and `ref_logprobs`). None where rewards stay as they are.
    """
    if not isinstance(loss, PolicyGradientLoss) or loss.kl_placement == "loss" or loss.kl_coef == 0:
        return None

    def penalties(batch: TokenBatch) -> Tensor:
        assert batch.ref_logprobs is not None
        estimates = terms.kl_estimate(batch.old_logprobs, batch.ref_logprobs, loss.kl_estimator)  # [T]
        sums = terms.segment_sum(estimates * batch.completion_mask, batch)  # [S]
        return loss.kl_coef * sums.new_zeros(batch.num_rollouts).index_add(0, torch.tensor(batch.owners), sums)

    return penalties
