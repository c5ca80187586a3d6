"""What the record of an iteration says: of its completions, of the logprobs that were trained on, and of the cost.
Equal runs differ in seconds, rates and memory alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offline_grpo.errors import require
from offline_grpo.model.layers import layer_configs, text_parameters
from offline_grpo.model.quantization import num_weights
from offline_grpo.model.routes import differing
from offline_grpo.placement.ranks import Ranks
from offline_grpo.train.advantage import group_advantages, rewards_of
from offline_grpo.types import FinishReason, Metrics, RolloutGroup, TokenBatch, by_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics of an iteration's completions before anything is dropped; of a mixture, also of each task by itself.
    Raises ConfigError if there is no group, of any process.
    """
    require(bool(groups), "rollouts", "[]", "next() returned nothing to train on; it must return a group or more")
    shown = ("reward_mean", "success_rate", "completion_tokens_mean", "truncated_frac")
    return _rollout_means(groups) | {
        f"task/{name}/{key}": value
        for name, own in by_task(groups).items()
        for key, value in _rollout_means(own).items()
        if key in shown or key.startswith("reward/")
    }


def _rollout_means(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    # Rewards, of completions that have one, and the parts of them that apply.
    scores = [r.score for r in rollouts if r.score.is_scored]
    found: dict[str, float] = {}
    if scores:
        rewards = [score.reward for score in scores]
        found = {"reward_mean": fmean(rewards), "reward_std": float(np.std(rewards))}
        found["success_rate"] = fmean(score.is_correct for score in scores)
    found |= _means("reward", [score.parts for score in scores])

    # Lengths, and whether longer completions get more: Pearson's correlation, each less the mean of its group.
    lengths = [r.num_sampled for r in rollouts]
    found["completion_tokens_mean"], found["completion_tokens_max"] = fmean(lengths), float(max(lengths))
    found["num_completion_tokens"] = float(sum(lengths) + sum(group.num_discarded_tokens for group in groups))
    if reasons := [r.finish_reason for r in rollouts if r.finish_reason is not None]:
        found["truncated_frac"] = fmean(reason is FinishReason.LENGTH for reason in reasons)

    # From how many tokens each was drawn, where filters left a part of the vocabulary.
    filtered = [r for r in rollouts if r.alternatives is not None]
    if sizes := [1 + len(own) for r in filtered for own in compress(r.alternatives or (), r.is_sampled)]:
        found["filters/kept_mean"], found["filters/kept_one_frac"] = fmean(sizes), fmean(size == 1 for size in sizes)
    if scored := [group for group in map(RolloutGroup.scored, groups) if group is not None]:
        of_groups = rewards_of(scored), [[float(r.num_sampled) for r in group.rollouts] for group in scored]
        # 0 where they differ by rounding
        x, y = (np.concatenate(group_advantages(values, scale="none")) for values in of_groups)
        spread = math.sqrt((x @ x) * (y @ y))
        found |= {"reward_length_correlation": float(x @ y) / spread} if spread > 0 else {}
    return found | score_metrics(groups)


def score_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """How many completions could not be scored, also of each cause; and the means of what the task measured."""
    causes = failures_of(groups)
    return {
        **_means("measured", [rollout.score.measured for group in groups for rollout in group.rollouts]),
        "scoring/num_failed": float(causes.total()),
        **{f"scoring/num_failed_{cause}": float(number) for cause, number in causes.items()},
    }


def failures_of(groups: Sequence[RolloutGroup]) -> Counter[str]:
    """How many completions could not be scored, by the cause."""
    scores = [rollout.score for group in groups for rollout in group.rollouts]
    return Counter(score.failure.partition(":")[0] for score in scores if score.failure is not None)


def _means(prefix: str, of_rollouts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rollouts that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for own in of_rollouts:
        for name, value in own.items():
            values[name].append(value)
    return {f"{prefix}/{name}": fmean(found) for name, found in sorted(values.items())}


MISMATCH_NATS = 0.1
"""A mean |trainer - engine| above this is no rounding: weights, dtype or sampling settings differ."""

MAX_LOG_WEIGHT = 300.0
"""In nats, of either sign: the square of such an importance weight still fits into float64, and is not 0."""


@dataclass
class Alignment:
    """Collects the microbatches of an iteration, once their `old_logprobs` are there."""

    _parts: list[torch.Tensor] = field(default_factory=list, init=False)
    _decisions: list[torch.Tensor] = field(default_factory=list, init=False)

    def add(self, part: TokenBatch, policy_logprobs: torch.Tensor, seen_routes: torch.Tensor | None = None) -> None:
        """Count a microbatch, with the logprobs [T] of the policy in training, and the routes [T, L, K] that it would
        have chosen, if it followed others. Does not wait for the device.
        """
        if part.routes is not None and seen_routes is not None:
            self._decisions.append(differing(part.routes, seen_routes))
        # What is summed over tokens to give means, spreads and weights; each [N], in float64.
        at = part.completion_positions  # [N]
        of_tokens = part.old_logprobs, part.rollout_logprobs, policy_logprobs, part.advantages
        ours, theirs, policy, advantages = (values.detach()[at].double() for values in of_tokens)
        difference = ours - theirs
        largest = difference.abs().max() if len(difference) else difference.new_zeros(())
        weights = difference.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
        terms = (
            torch.ones_like(ours),
            difference,
            difference.abs(),
            ours,
            ours.square(),
            theirs,
            theirs.square(),
            weights,
            weights.square(),
            (advantages > 0).double(),
            policy * (advantages > 0),
            (advantages < 0).double(),
            policy * (advantages < 0),
        )
        self._parts.append(torch.stack([*(term.sum() for term in terms), largest]))  # [14]

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over the tokens of all processes. Empty without tokens."""
        # Shares of the decisions of routers, of all blocks and of each.
        shares: dict[str, float] = {}
        if rows := ranks.gather([torch.stack(self._decisions).sum(0).tolist()] if self._decisions else []):
            differ, count = np.array(rows).sum(0)  # [L] each
            shares = {f"routes/block_{n:02d}/differ_frac": float(differ[n] / count[n]) for n in count.nonzero()[0]}
            shares["routes/differ_frac"] = float(differ.sum() / count.sum())
        # Sums of all microbatches, then of all processes, of which one may have none. What is not finite belongs to
        # updates that were refused.
        own = []
        if self._parts:
            parts = torch.stack(self._parts).cpu()
            parts = parts[parts.isfinite().all(-1)]
            own = [[*parts[:, :-1].sum(0).tolist(), max(parts[:, -1].tolist(), default=0.0)]]
        if not (rows := ranks.gather(own)):
            return shares
        sums = [sum(column) for column in zip(*rows, strict=True)]
        count, diff, absolute, ours, ours_squared, theirs, theirs_squared, weights, weights_squared, *by_sign, _ = sums
        if count == 0:
            return shares
        found = shares | {
            "alignment/diff_mean": diff / count,
            "alignment/diff_abs_mean": absolute / count,
            "alignment/diff_max": max(row[-1] for row in rows),
        }
        for name, total, squares in (("training", ours, ours_squared), ("inference", theirs, theirs_squared)):
            found[f"logprobs/{name}_mean"] = total / count
            found[f"logprobs/{name}_std"] = math.sqrt(max(0.0, squares / count - (total / count) ** 2))
        found["mismatch/ess_frac"] = weights**2 / (count * weights_squared)  # Kish's effective sample size, per token
        num_positive, positive, num_negative, negative = by_sign
        found |= {"pos_logp": positive / num_positive} if num_positive else {}
        found |= {"neg_logp": negative / num_negative} if num_negative else {}
        return found


PEAK_FLOPS = {
    "B200": 2250e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "A10G": 70e12,
    "L4": 121e12,
}
"""Of the makers' data sheets, dense, in bfloat16, by a part of the GPU's name; PCIe and SXM cards count alike."""


def cost_metrics(
    seconds: Mapping[str, float],
    metrics: Metrics,
    *,
    flops: float | None,
    device: torch.device,
    card_bytes: int,
    num_devices: int,
) -> dict[str, float]:
    """Seconds of each phase, and throughput: of sampling and of training over their own time, and of the whole
    iteration. A source that samples at other times than in the phase "generate" says in how many seconds by
    `time/sampling_s`, which is 0 where nothing was sampled. On a GPU also memory, and the share of its peak that the
    training's `flops` are.

    Args:
        card_bytes: the most that was in use on the GPU, a server's share included.
    """
    found = {f"time/{name}_s": value for name, value in seconds.items()}
    found["time/sampling_s"] = sampling_s = metrics.get("time/sampling_s", seconds["generate"])
    found["time/iteration_s"] = total_s = sum(seconds.values())
    found["perf/tokens_per_s"] = metrics["num_completion_tokens"] / total_s
    if sampling_s > 0:
        found["perf/generate_tokens_per_s"] = metrics["num_completion_tokens"] / sampling_s
    if "num_tokens_trained" in metrics:
        found["perf/train_tokens_per_s"] = metrics["num_tokens_trained"] / seconds["train"]
    if device.type != "cuda":
        return found

    # The most memory that this process has held since the last call, in GB (1e9 bytes): in tensors, and reserved.
    found["perf/gpu_memory_card_gb"] = card_bytes / 1e9
    found["perf/gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    found["perf/gpu_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    peak = peak_flops(device)
    if peak is not None and flops is not None:
        found["perf/mfu"] = flops / (seconds["train"] * peak * num_devices)
    return found


def card_bytes(device: torch.device) -> int:
    """What all processes together hold on a GPU now, a server's included; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def update_flops(model: PreTrainedModel, sequence_lengths: Sequence[int]) -> float | None:
    """Operations of a forward and a backward pass of text over these sequences, prompts included; None where
    config.json does not say how large the heads are.

    A weight of a matrix takes two per token in the forward pass and two for the gradient of its input; two more, if it
    is trained, for its own. Of the embeddings only the output head counts. Of the experts of a layer those count that a
    token goes to. Attention takes 12 x layers x heads x head size x L^2 / 2 for a sequence of L tokens: causal, over
    everything before. What is computed again, because it was not kept, does not count.
    """
    # Each weight of a matrix, for each token.
    config: Any = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((number for name in names if (number := getattr(config, name, None))), None)
    active_experts = getattr(config, "num_experts_per_tok", 1) / num_experts if num_experts else 1.0
    per_token = 0.0
    for name, parameter in text_parameters(model).items():
        if parameter.dim() < 2 or (parameter is embedding.weight and not is_tied):
            continue
        active = active_experts if ".experts." in name else 1.0
        per_token += active * num_weights(parameter) * (6 if parameter.requires_grad else 4)

    # Attention, for each pair of tokens of a sequence.
    per_square = 0.0
    try:
        for layer in layer_configs(config):
            num_heads = getattr(layer, "num_attention_heads", 0)  # Mamba has none
            head_size = getattr(layer, "head_dim", None) or (layer.hidden_size // num_heads if num_heads else 0)
            per_square += 12 * num_heads * head_size / 2
    except (AttributeError, RuntimeError):  # the latter is what transformers raises where layers differ
        return None
    return per_token * sum(sequence_lengths) + per_square * sum(length**2 for length in sequence_lengths)


def peak_flops(device: torch.device) -> float | None:
    """Operations per second of a GPU; None for one that is not in the table, and for a CPU."""
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)
