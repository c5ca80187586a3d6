"""Strategies that move nothing: for a client that samples from the trained module itself, and for a frozen server."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from offline_grpo.engine.engine import Engine, LocalEngine
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.errors import ConfigError, GrpoError, reason_of
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.types import Rollout, SamplingParams, SamplingRequest, Score
from offline_grpo.weight_sync.proof import PROBE_TOKENS, probe_difference, probe_prompts, scored
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import SyncRequirements, WeightSync

log = logging.getLogger(__name__)

CACHE_TOLERANCE_NATS = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Of models that decode right, tiny ones have 1e-6 in fp32."""
LONGEST_ON_CPUS = 160  # tokens of a sequence: 2 s for 135 million weights on one core, of which 512 tokens would take 5


def prove_sampling(client: RolloutClient, policy: Policy, num_tokens: int) -> None:
    """See that what is sampled in process, with a cache, has the logprobs of a forward pass without one: a few tokens
    after prompts of two lengths, in sequences of up to `num_tokens` (fewer on a CPU). Raises ConfigError if the model
    cannot be sampled so, or differs by more than rounding.
    """
    model = policy.causal_lm
    num_tokens = num_tokens if model.device.type == "cuda" else min(num_tokens, LONGEST_ON_CPUS)
    prompts = probe_prompts(policy, (num_tokens - PROBE_TOKENS, max(1, num_tokens // 2 - PROBE_TOKENS)))
    requests = [SamplingRequest(tuple(prompt), 2, seed) for prompt, seed in zip(prompts, (0, 2), strict=True)]

    # An architecture that wants a cache of its own may raise anything.
    try:
        sampled = list(client.generate(requests, SamplingParams(PROBE_TOKENS)))
    except Exception as error:
        if isinstance(error, GrpoError | torch.OutOfMemoryError):
            raise
        fault = f"cannot be sampled in process ({reason_of(error)})"
    else:
        about = {"temperature": 1.0, "text": "", "score": Score(0.0, False, {})}
        rollouts = [Rollout.of_one_turn(prompts[i], each, **about) for i, group in sampled for each in group]
        difference = probe_difference(scored(policy, rollouts)).abs().mean().item()
        if difference <= CACHE_TOLERANCE_NATS[policy.dtype]:
            return
        fault = f"is sampled in process {difference:.2g} nats away from its own forward pass"
    fix = "use generation=vllm_server"
    raise ConfigError(f"model.train_id={model.name_or_path}: {type(model).__name__} {fault}; {fix}")


class InProcess(WeightSync):
    """A `WeightSync`: the client's module is the policy's module, so every weight is the same object."""

    name = "in_process"
    interval = 1  # shared weights are always the newest
    requires = SyncRequirements(engine=LocalEngine, moves="any")

    def attach(self, engine: Engine, snapshot: Snapshot) -> None:
        """Raises ConfigError unless the engine samples from the policy's own module."""
        if getattr(engine, "model", None) is not snapshot.policy.model:
            raise ConfigError(
                f"weight_sync=in_process: {type(engine).__name__} does not sample from the trained module; "
                "use generation=transformers, or a weight_sync that moves weights"
            )


class Frozen(WeightSync):
    """A `WeightSync` for servers that nobody may touch: they keep their weights, whatever training makes of the policy.

    Nothing is proven: the server may serve any model. `alignment/*` says how far its logprobs are from the policy's.
    """

    name = "none"
    interval = 1
    requires = SyncRequirements(engine=ServerEngine, moves="nothing")

    def start_words(self, snapshot: Snapshot, *, is_recovery: bool) -> tuple[str, Mapping[str, object]]:
        """The model before training, in a resumed run too."""
        return super().start_words(snapshot, is_recovery=True)

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """Says once what every later line of the run means."""
        log.warning(
            "weight_sync=none: the server at %s is frozen. It gets no weights, so what it samples comes from its own "
            "model (version 0) and not from the policy, and alignment/* grows as the policy learns",
            engine.base_url,
        )
