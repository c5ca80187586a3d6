"""After every push the server must say that it has the version, have the trainer's bits, and sample like the trainer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from offline_grpo.engine.control import ServedBits
from offline_grpo.engine.engine import ServerEngine
from offline_grpo.errors import EngineError
from offline_grpo.generation.sample import complete_in_order
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Rollout, SamplingParams, SamplingRequest, Score
from offline_grpo.weight_sync.snapshot import Snapshot, weights_tag

log = logging.getLogger(__name__)

PROBE_PROMPTS = 2
PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 160
"""More than a block of the prefix cache (16 tokens on GPUs, 128 on CPUs), so that a stale cache shows."""


@dataclass(frozen=True)
class Proof:
    """How far the weights that an engine serves are from those that are trained. Differences are trainer - server, in nats, over the
    probe's tokens."""

    num_equal: int  # tensors that are equal bit for bit; 0 where none could be compared
    diff_mean: float
    diff_abs_mean: float
    diff_max: float

    def metrics(self) -> dict[str, float]:
        """For the iteration's metrics file."""
        return {
            "sync/probe_diff_mean": self.diff_mean,
            "sync/probe_diff_abs_mean": self.diff_abs_mean,
            "sync/probe_diff_max": self.diff_max,
            "sync/num_tensors_proven": float(self.num_equal),
        }


def verify(snapshot: Snapshot, engine: ServerEngine, *, version: int, tolerance_nats: float, is_tagged: bool = True) -> Proof:
    """Compare what an engine serves with what is trained, and log the verdict.

    Args:
        tolerance_nats: for the mean |trainer - server| over the probe's logprobs.
        is_tagged: the server notes the tags of pushes; False where requests name the version themselves.

    Raises:
        EngineError: another version, a tensor with other bits, or logprobs further apart than `tolerance_nats` on average.
    """
    served_tag = engine.control.served_tag() if is_tagged else weights_tag(version)
    unequal, num_compared = _compare_bits(snapshot, engine.control.served_bits()) if is_tagged else ([], 0)
    difference = probe(snapshot.policy, engine.client)
    diff_abs_mean, diff_max = difference.abs().mean().item(), difference.abs().max().item()
    num_equal = num_compared - len(unequal)
    says = (
        f"version {version}: |trainer - server| {diff_abs_mean:.2g} nats on average, {diff_max:.2g} at most"
        f"{f'; {num_equal} of {num_compared} tensors equal bit for bit' if num_compared else ''}"
    )
    if served_tag != weights_tag(version):
        raise EngineError(f"[MISMATCH] {says}; the server has version {served_tag}: something else pushes to it, or it was restarted")
    if unequal:
        raise EngineError(f"[MISMATCH] {says}; others are not what was pushed: {', '.join(unequal[:5])}")
    if not diff_abs_mean <= tolerance_nats:
        raise EngineError(
            f"[MISMATCH] {says}; above weight_sync.tolerance_nats={tolerance_nats:g}: stale weights or caches, or a server that computes "
            "something else (dtype, rope scaling, quantisation); see docs/troubleshooting.md"
        )
    log.info("[OK] %s", says)
    return Proof(num_equal, difference.mean().item(), diff_abs_mean, diff_max)


def probe(policy: Policy, client: RolloutClient) -> torch.Tensor:
    """Trainer minus server logprob, in nats, of each token that the server samples after fixed prompts: [N].

    The prompts are the same every time, so a prefix cache that was not flushed answers from old weights and shows.
    """
    config: Any = policy.causal_lm.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or PROBE_PROMPT_TOKENS + PROBE_TOKENS
    length = min(PROBE_PROMPT_TOKENS, context - PROBE_TOKENS)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(min(config.vocab_size, 1000), (PROBE_PROMPTS, length), generator=draw).tolist()
    requests = [SamplingRequest(tuple(prompt), 1, seed) for seed, prompt in enumerate(prompts)]
    completions = complete_in_order(client, requests, SamplingParams(PROBE_TOKENS))
    unscored = Score(0.0, False, {})
    rollouts = [
        Rollout.of_one_turn(prompt, completion, temperature=1.0, text="", score=unscored)
        for prompt, [completion] in zip(prompts, completions, strict=True)
    ]
    batch = build_batch(rollouts, mask_truncated=False)
    ours = policy.logprobs(batch.to(policy.device)).cpu()
    return (ours - batch.rollout_logprobs)[batch.completion_mask]


def _compare_bits(snapshot: Snapshot, served: ServedBits | None) -> tuple[list[str], int]:
    """The names of parameters whose bits differ, and how many could be compared.

    None of adapters, and of servers that hold quantised weights, parts of them, or another dtype.
    """
    policy = snapshot.policy
    if served is None or policy.lora_rank is not None or served.dtype != str(policy.dtype).removeprefix("torch."):
        return [], 0
    trained = snapshot.fingerprints
    names = [name for name in trained if name in served.fingerprints]
    return [name for name in names if trained[name] != served.fingerprints[name]], len(names)
