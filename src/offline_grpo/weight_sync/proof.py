"""Trust nothing about sync: after every push the server must say that it has the version, have the trainer's bits, and act like it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints
from offline_grpo.engine.server import stamp
from offline_grpo.engine.sglang_control import SglangControl
from offline_grpo.engine.vllm_control import VllmControl
from offline_grpo.errors import EngineError
from offline_grpo.generation.sample import complete_in_order
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Rollout, SamplingParams, SamplingRequest, Score

log = logging.getLogger(__name__)

PROBE_PROMPTS = 2
PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 160
"""More than a block of the prefix cache (16 tokens on GPUs, 128 on CPUs), so that a stale cache shows."""


@dataclass(frozen=True)
class Proof:
    """How far served and trained policy are apart. Differences are trainer - server, in nats, over the probe's tokens."""

    num_equal: int
    num_compared: int
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


def prove(
    policy: Policy, client: RolloutClient, control: VllmControl | SglangControl | None, *, version: int, tolerance_nats: float
) -> Proof:
    """Compare what is served with what is trained, and log the verdict.

    Args:
        control: for the server's own word on version and bits; None where it cannot give that.

    Raises:
        EngineError: another version, a tensor with other bits, or logprobs further apart than `tolerance_nats` on average.
    """
    served = control.served_stamp() if control is not None else stamp(version)
    unequal, num_compared = _compare_bits(policy, control) if isinstance(control, VllmControl) else ([], 0)
    difference = probe(policy, client)
    proof = Proof(
        num_equal=num_compared - len(unequal),
        num_compared=num_compared,
        diff_mean=difference.mean().item(),
        diff_abs_mean=difference.abs().mean().item(),
        diff_max=difference.abs().max().item(),
    )
    says = (
        f"version {version}: |trainer - server| {proof.diff_abs_mean:.2g} nats on average, {proof.diff_max:.2g} at most"
        f"{f'; {proof.num_equal} of {num_compared} tensors equal bit for bit' if num_compared else ''}"
    )
    if served != stamp(version):
        raise EngineError(f"[MISMATCH] {says}; the server has version {served}: something else pushes to it, or it was restarted")
    if unequal:
        raise EngineError(f"[MISMATCH] {says}; others are not what was pushed: {', '.join(unequal[:5])}")
    if not proof.diff_abs_mean <= tolerance_nats:
        raise EngineError(
            f"[MISMATCH] {says}; above weight_sync.tolerance_nats={tolerance_nats:g}: stale weights or caches, or a server that computes "
            "something else (dtype, rope scaling, quantisation); see docs/troubleshooting.md"
        )
    log.info("[OK] %s", says)
    return proof


def probe(policy: Policy, client: RolloutClient) -> torch.Tensor:
    """Trainer minus server logprob, in nats, of each token that the server samples after fixed prompts: [N].

    The prompts are the same every time, so a prefix cache that was not flushed answers from old weights and shows.
    """
    config = policy.causal_lm.config.get_text_config()
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


def _compare_bits(policy: Policy, control: VllmControl) -> tuple[list[str], int]:
    """The names of parameters whose bits differ, and how many could be compared.

    None of adapters, and of servers that hold quantised weights, parts of them, or another dtype.
    """
    state = control.call_worker("grpo_state")
    if policy.lora_rank is not None or state["dtype"] != str(policy.dtype).removeprefix("torch."):
        return [], 0
    theirs = state["fingerprints"]
    ours = {name: p.data for name, p in policy.causal_lm.named_parameters() if name in theirs}
    bits = dict(zip(ours, fingerprints(list(ours.values())), strict=True))
    return [name for name in bits if bits[name] != theirs[name]], len(bits)
