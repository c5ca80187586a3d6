"""Building blocks of the losses: ratios, clips, KL estimates, aggregation. All [T] tensors are over the tokens of a
flat `TokenBatch`. A rollout may have several sequences. Means are over rollouts; likelihoods of a whole sequence
(GSPO's ratio, sequence_* corrections, the off-policy and the geometric mask) are computed for each sequence by itself.

An aggregation is one constant weight per token: a loss is `sum_t weight[t] * value[t]`, and terms with the same
aggregation share the weights. Tokens outside the completion mask have weight 0, so their values do not matter.

A log-ratio beyond 80 nats means wrong data (another tokenizer, another model). Where the loss depends on such a ratio,
its gradient is so large that the norm overflows and the trainer refuses the update. Where it does not (a clip, a mask,
an advantage of 0), the token has the gradient 0 that the formula gives it: see `bounded`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offline_grpo.types import BatchTotals, TokenBatch

MAX_LOG_RATIO = 80.0
"""In nats. exp(88.8) overflows float32; the rest is for the factors that a ratio meets, such as advantages."""


class Surrogate(NamedTuple):
    """Each token's policy-gradient loss, and whether the clip removed the gradient of its ratio."""

    loss: Tensor  # [T], with gradient
    is_clipped_low: Tensor  # [T] bool: the ratio fell below the lower bound
    is_clipped_high: Tensor  # [T] bool: the ratio rose above the upper bound


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio [T], at most 80, so that its exp is finite: an infinite ratio would turn every gradient that a clip
    or a mask has made 0 into NaN (0 * inf). Its gradient stays that of the log-ratio; a clamp's would be 0.
    """
    return log_ratio - (log_ratio - MAX_LOG_RATIO).clamp(min=0.0).detach()


def segment_sum(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sum of `values` [T] over the tokens of each sequence, [S]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, values)


def segment_mean(values: Tensor, mask: Tensor, batch: TokenBatch) -> Tensor:
    """Mean of `values` [T] over the completion tokens of each sequence, [S]; 0 where it has none."""
    return segment_sum(values * mask, batch) / segment_sum(mask, batch).clamp(min=1.0)


def token_mean_weights(mask: Tensor, totals: BatchTotals) -> Tensor:
    """Weights [T] of the mean over all completion tokens of the optimizer batch; `mask` [T] is 0.0 / 1.0."""
    return mask / max(totals.num_completion_tokens, 1)


def sequence_mean_weights(mask: Tensor, batch: TokenBatch, totals: BatchTotals) -> Tensor:
    """Weights [T] of the mean over rollouts of token means; a fully masked rollout adds 0 but counts."""
    # Each rollout weighs 1 / (rollouts of the optimizer batch), which its tokens share equally.
    num_tokens = batch.rollout_sizes  # [T]; None where each rollout is one sequence
    if num_tokens is None:
        num_tokens = segment_sum(mask, batch).clamp(min=1.0).index_select(0, batch.sequence_ids)
    return mask / num_tokens / totals.num_rollouts


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """PPO's surrogate [T] `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` (arXiv 1707.06347).

    The gradient is 0 only where the policy has already moved past a bound in the direction that the advantage favours:
        A > 0: ratio above 1 + clip_high          A < 0: ratio below 1 - clip_low

    `dual_clip` bounds the ratio in the unclipped term, like TRL's `delta`. It takes effect where A < 0 and the ratio is
    large, because there the plain loss grows without limit. With a bound above 1 + clip_high this equals verl's dual
    clip with `clip_ratio_c` (arXiv 1912.09729).
    """
    # The worse of two values for each token, [T]: beyond a bound that is the clipped one, which is constant.
    unclipped = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)

    # Where it removed the gradient, for the metrics: only on the side that the advantage favours.
    is_low = (ratio < 1 - clip_low) & (advantages < 0)
    is_high = (ratio > 1 + clip_high) & (advantages > 0)
    if dual_clip is not None:
        is_high = is_high | ((ratio > dual_clip) & (advantages < 0))
    return Surrogate(-torch.minimum(unclipped * advantages, clipped * advantages), is_low, is_high)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate [T] in nats of KL(policy || reference), for tokens sampled from the policy (J. Schulman,
    "Approximating KL").

    With d = log ref - log policy: k1 = -d (unbiased, can be negative), k2 = d^2 / 2 (biased, low variance), k3 = exp(d)
    - 1 - d (unbiased, never negative). k1 has no effect as a loss term on its own: its expected gradient is 0 unless
    weighted by the ratio.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(bounded(log_ratio)) - log_ratio


def k3_times_ratio(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """`ratio * k3` [T], where `ratio` [T] is exp(logprobs - any constant): its gradient is -ratio * d, with d as in
    `kl_estimate`.

    Autograd would get there by ratio * (exp(d) - 1 - d) + ratio * (1 - exp(d)), of which float32 keeps nothing from d =
    16 on.
    """
    # The value as it is, and beside it a term of value 0 that carries the gradient. [T]
    value = (kl_estimate(logprobs, ref_logprobs, "k3") * ratio).detach()
    gradient = (ratio * (logprobs - ref_logprobs)).detach()
    return value + gradient * (logprobs - logprobs.detach())


def importance_weights(batch: TokenBatch, mask: Tensor, *, correction: str, cap: float, floor: float) -> Tensor:
    """Weights [T] `old policy / engine` that correct for the engine's slightly different probabilities; no gradient.

    "token_*" weights each token by its own ratio, "sequence_*" weights all tokens of a sequence by the product of their
    ratios. "*_truncate" clamps the ratio to [floor, cap] (truncated importance sampling); "*_mask" sets ratios outside
    to 0.
    """
    # 0 outside the completion, so that the sum over a sequence is that of its sampled tokens.
    log_ratio = ((batch.old_logprobs - batch.rollout_logprobs) * mask).detach()  # [T]
    if correction == "none":
        return torch.ones_like(log_ratio)
    if correction.startswith("sequence"):
        log_ratio = segment_sum(log_ratio, batch).index_select(0, batch.sequence_ids)
    ratio = bounded(log_ratio).exp()
    if correction.endswith("truncate"):
        return ratio.clamp(floor, cap)
    return ratio.masked_fill((ratio < floor) | (ratio > cap), 0.0)


def off_policy_mask(logprobs: Tensor, batch: TokenBatch, mask: Tensor, threshold: float) -> Tensor:
    """1 or 0 [T]: 0 for tokens with a negative advantage in sequences that the policy finds less likely than the engine
    did, by more than `threshold` nats per token (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556).
    """
    # How many nats per token the policy now gives a sequence less than the engine did.
    drift = segment_mean(batch.rollout_logprobs - logprobs.detach(), mask, batch)  # [S]
    is_near = (drift <= threshold).index_select(0, batch.sequence_ids)
    return ((batch.advantages >= 0) | is_near).to(logprobs.dtype)


def geometric_mask(batch: TokenBatch, mask: Tensor, low: float, high: float) -> Tensor:
    """1 or 0 [T]: 0 in sequences whose geometric mean of `old policy / engine` lies outside [low, high]; verl 0.9.1 has
    it as `seq_mean_k1` of `rollout_rs`, with the bounds of the inverse.
    """
    # The mean of the logs is the log of the geometric mean: one ratio for each sequence, whatever its length.
    mean = bounded(segment_mean(batch.old_logprobs - batch.rollout_logprobs, mask, batch)).exp()  # [S]
    return ((mean >= low) & (mean <= high)).to(mask.dtype).index_select(0, batch.sequence_ids)


def mismatch(batch: TokenBatch) -> dict[str, Tensor]:
    """Trainer/engine logprob mismatch [T] in nats per token; 0 (ratio 1) if both compute the same.

    `kl_k1` and `kl_k3` estimate KL(engine || trainer), because the rollouts are samples from the engine.
    """
    # Both of the policy before its updates, so what is left is how differently trainer and engine compute.
    log_ratio = (batch.old_logprobs - batch.rollout_logprobs).detach()
    return {
        "mismatch/kl_k1": -log_ratio,
        "mismatch/kl_k3": kl_estimate(batch.rollout_logprobs, batch.old_logprobs, "k3").detach(),
        "mismatch/ratio_mean": bounded(log_ratio).exp(),
    }
