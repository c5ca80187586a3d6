"""Builds the deployments of training and evaluation: rollout clients, their servers, and what keeps the weights current."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offline_grpo.engine.engine import engine_of
from offline_grpo.engine.server import Server
from offline_grpo.interfaces import Deployment, RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import end_ids
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.build import build
from offline_grpo.run.engine_spec import EngineSpec
from offline_grpo.settings import EvalConfig
from offline_grpo.weight_sync import deployment
from offline_grpo.weight_sync.in_process import InProcess
from offline_grpo.weight_sync.lora_hotswap import LoraHotswap
from offline_grpo.weight_sync.rank_zero import RankZeroDeployment
from offline_grpo.weight_sync.reload import Reload
from offline_grpo.weight_sync.snapshot import FullWeights
from offline_grpo.weight_sync.strategy import WeightSync

HIGHEST_LORA_RANK = 512
"""That vLLM can be started for: an external server says itself what it has room for."""


def for_training(
    spec: EngineSpec,
    weight_sync: WeightSync,
    policy: Policy,
    *,
    full_weights: FullWeights,
    run_folder: Path,
    gpus: Sequence[int] | None,
    ranks: Ranks,
) -> Deployment:
    """The engine of `generation` and the strategy of `weight_sync`, not connected yet.

    Args:
        gpus: that a server which the run starts may see; None: all that this process sees.
    """
    server = None
    if spec.needs_server:
        needs = weight_sync.requires
        if ranks.is_main:
            server = Server(
                base_url=spec.base_url,
                api_key=spec.api_key,
                launcher=spec.launcher,
                log_dir=run_folder,
                gpus=gpus,
                args=needs.server_args,
                env=needs.env,
            )
        url = ranks.broadcast(server.base_url if server is not None else None)
        server = server or Server(base_url=url, api_key=spec.api_key, launcher=None, log_dir=run_folder)
    return _deployment(spec, server, weight_sync, policy, full_weights, ranks)


def for_evaluation(
    spec: EngineSpec | None,
    settings: EvalConfig,
    training: Deployment,
    policy: Policy,
    *,
    full_weights: FullWeights,
    run_folder: Path,
    ranks: Ranks,
) -> Deployment:
    """What evaluations ask, not connected yet; `training` itself where `spec` is None."""
    if spec is None:
        return training
    if not spec.needs_server:
        return _deployment(spec, None, InProcess(), policy, full_weights, ranks)
    server = Server(base_url=spec.base_url, api_key=spec.api_key, launcher=None, log_dir=run_folder, key="eval.base_url")
    return _deployment(spec, server, _evaluation_sync(spec, settings, policy), policy, full_weights, ranks)


def _evaluation_sync(spec: EngineSpec, settings: EvalConfig, policy: Policy) -> WeightSync:
    """How the evaluations' own server gets the weights."""
    common: dict[str, Any] = {"interval": 1, "tolerance_nats": settings.tolerance_nats}
    if policy.lora_rank is not None:
        return LoraHotswap(**common, server_args={"max_lora_rank": HIGHEST_LORA_RANK})
    gentle = Reload(**common, server_args={}, location=settings.location, pause_mode="keep")
    if spec.client_class.engine_name not in gentle.requires.refused:
        return gentle
    return Reload(**common, server_args={}, location=settings.location, pause_mode="abort")  # of this run, no request is in flight


def _deployment(
    spec: EngineSpec, server: Server | None, weight_sync: WeightSync, policy: Policy, full_weights: FullWeights, ranks: Ranks
) -> Deployment:
    client = build(
        spec.client_node,
        key=spec.key,
        protocol=RolloutClient,
        model=policy.model,
        tokenizer=policy.tokenizer,
        server=server,
        eos_ids=end_ids(policy.causal_lm.generation_config, policy.tokenizer),
    )
    inner = deployment.Deployment([engine_of(client)], weight_sync, full_weights)
    return RankZeroDeployment(inner, ranks) if server is not None and ranks.world_size > 1 else inner
