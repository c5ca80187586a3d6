"""The pieces that losses are made of: ratios, clips, KL estimates, aggregation. All [T] tensors run over a flat `TokenBatch`.

An aggregation is one constant weight per token, so that a loss is `sum_t weight[t] * value[t]` and the terms of a loss that share an
aggregation share the weights. Tokens outside the completion mask weigh 0, whatever value stands there.

Nothing is clamped for overflow: a log-ratio beyond +-80 nats means wrong data (another tokenizer, another model), and a non-finite loss
that the trainer rejects is better than a finite one that hides it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offline_grpo.types import BatchTotals, TokenBatch

KL_ESTIMATORS = ("k1", "k2", "k3")
IMPORTANCE_CORRECTIONS = ("none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask")


class Surrogate(NamedTuple):
    """What a token contributes to the policy-gradient loss, and whether the clip took its ratio's gradient away."""

    loss: Tensor  # [T], with gradient
    is_clipped_low: Tensor  # [T] bool: the ratio fell below the lower bound
    is_clipped_high: Tensor  # [T] bool: the ratio rose above the upper bound


def segment_sum(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sum of `values` [T] over the tokens of each sequence, [S]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, values)


def token_mean_weights(mask: Tensor, totals: BatchTotals) -> Tensor:
    """Weights [T] of the mean over all completion tokens of the optimizer batch; `mask` [T] is the completion mask as 0.0 / 1.0."""
    return mask / max(totals.num_completion_tokens, 1)


def sequence_mean_weights(mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
    """Weights [T] of the mean over sequences of each sequence's token mean; a fully masked sequence adds 0 but is counted."""
    num_tokens = segment_sum(mask, batch).clamp(min=1.0)  # [S]
    return mask / num_tokens.index_select(0, batch.sequence_ids) / totals.num_sequences


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Surrogate:
    """PPO's pessimistic surrogate `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` (arXiv 1707.06347), [T].

    The gradient is 0 only where the policy has already moved past a bound in the direction that the advantage asks for:
        A > 0: ratio above 1 + clip_high          A < 0: ratio below 1 - clip_low

    `dual_clip` bounds the ratio of the unclipped arm, as TRL's `delta` does, and so acts where A < 0 and the ratio is large: there the
    plain loss grows without limit. With the bound above 1 + clip_high this is verl's dual clip with `clip_ratio_c` (arXiv 1912.09729).
    """
    unclipped = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_low = (ratio < 1 - clip_low) & (advantages < 0)
    is_high = (ratio > 1 + clip_high) & (advantages > 0)
    if dual_clip is not None:
        is_high = is_high | ((ratio > dual_clip) & (advantages < 0))
    return Surrogate(-torch.minimum(unclipped * advantages, clipped * advantages), is_low, is_high)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate [T] in nats of KL(policy || reference), for tokens sampled from the policy (J. Schulman, "Approximating KL").

    With d = log ref - log policy: k1 = -d (unbiased, can be negative), k2 = d^2 / 2 (biased, low variance), k3 = exp(d) - 1 - d
    (unbiased, never negative). As a loss on its own k1 pulls nowhere: its expected gradient is 0 unless weighted by the ratio.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def importance_weights(batch: TokenBatch, mask: Tensor, *, correction: str, cap: float, floor: float) -> Tensor:
    """Weights [T] `old policy / engine` that correct for the engine sampling from slightly different probabilities; no gradient.

    "token_*" weighs each token by its own ratio, "sequence_*" all tokens of a sequence by the product of their ratios.
    "*_truncate" clamps the ratio into [floor, cap] (truncated importance sampling), "*_mask" gives 0 to what lies outside.
    """
    log_ratio = ((batch.old_logprobs - batch.rollout_logprobs) * mask).detach()  # [T]
    if correction == "none":
        return torch.ones_like(log_ratio)
    if correction.startswith("sequence"):
        log_ratio = segment_sum(log_ratio, batch).index_select(0, batch.sequence_ids)
    ratio = log_ratio.exp()
    if correction.endswith("truncate"):
        return ratio.clamp(floor, cap)
    return ratio.masked_fill((ratio < floor) | (ratio > cap), 0.0)


def mismatch(batch: TokenBatch) -> dict[str, Tensor]:
    """Per-token distances [T] in nats between what engine and trainer say of the same weights: 0, and ratio 1, were both exact.

    `kl_k1` and `kl_k3` estimate KL(engine || trainer), whose samples the rollouts are.
    """
    log_ratio = (batch.old_logprobs - batch.rollout_logprobs).detach()
    return {
        "mismatch/kl_k1": -log_ratio,
        "mismatch/kl_k3": torch.expm1(log_ratio) - log_ratio,
        "mismatch/ratio_mean": log_ratio.exp(),
    }
