"""Builds the deployments of training and evaluation: rollout clients, their servers, and what keeps the weights current."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offline_grpo.engine.engine import engine_of
from offline_grpo.engine.server import Server
from offline_grpo.engine.sglang import SglangEngine
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Deployment, RolloutClient, Sharding
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import end_ids
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.build import build
from offline_grpo.run.engine_spec import EngineSpec
from offline_grpo.settings import EvalConfig
from offline_grpo.types import SamplingParams
from offline_grpo.weight_sync import deployment
from offline_grpo.weight_sync.frozen import Frozen
from offline_grpo.weight_sync.in_process import InProcess
from offline_grpo.weight_sync.lora_hotswap import LoraHotswap, room_for
from offline_grpo.weight_sync.lora_restart import LoraRestart
from offline_grpo.weight_sync.rank_zero import RankZeroDeployment
from offline_grpo.weight_sync.reload import Reload
from offline_grpo.weight_sync.strategy import WeightSync

log = logging.getLogger(__name__)

LAUNCHERS = {launcher.name: launcher for launcher in (VllmEngine, SglangEngine)}
"""How a server of each kind is started."""


def training_server(
    spec: EngineSpec, weight_sync: WeightSync, *, run_folder: Path, gpus: Sequence[int] | None, ranks: Ranks
) -> Server | None:
    """The server that `generation` samples from, not started yet; None where it samples in this process.

    Args:
        gpus: that a server which the run starts may see; None: all that this process sees.
    """
    if not spec.needs_server:
        return None
    server, needs = None, weight_sync.requires
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
    url, key = ranks.broadcast((server.base_url, server.api_key) if server is not None else (None, None))
    return server or Server(base_url=url, api_key=key, launcher=None, log_dir=run_folder)


def starts_beside_loading(weight_sync: WeightSync, *, gpus: Sequence[int] | None, trainers: Sequence[int]) -> bool:
    """Whether a server may start while the policy is loaded.

    Not on a GPU onto which the policy is loaded: vLLM takes what others allocate meanwhile for its own, and ends if they free something.

    Args:
        gpus: the server's, see `training_server`.
        trainers: those of the training processes.
    """
    needs_policy = isinstance(weight_sync, LoraRestart)  # its command line names the adapter
    shared = set(trainers) if gpus is None else set(trainers) & set(gpus)
    return not needs_policy and (weight_sync.requires.shares_weights or not shared)


def for_training(
    spec: EngineSpec,
    server: Server | None,
    weight_sync: WeightSync,
    policy: Policy,
    *,
    sampling: SamplingParams,
    sharding: Sharding,
    ranks: Ranks,
) -> Deployment:
    """The engine of `generation` and the strategy of `weight_sync`, not connected yet.

    Args:
        server: see `training_server`.
        sampling: the settings of training.
    """
    return _deployment(spec, server, weight_sync, policy, sampling, sharding, ranks)


def for_evaluation(
    spec: EngineSpec | None,
    weight_sync: WeightSync,
    training: Deployment,
    policy: Policy,
    *,
    sampling: SamplingParams,
    sharding: Sharding,
    run_folder: Path,
    ranks: Ranks,
) -> Deployment:
    """What evaluations ask, not connected yet; `training` itself where `spec` is None."""
    if spec is None:
        return training
    server = _found(spec, run_folder) if spec.needs_server else None
    return _deployment(spec, server, weight_sync, policy, sampling, sharding, ranks)


def evaluation_sync(spec: EngineSpec | None, settings: EvalConfig, training: WeightSync, *, lora_rank: int | None) -> WeightSync:
    """The strategy that brings weights to the engine of evaluations; that of training if both share one engine."""
    if spec is None:
        return training
    if not spec.needs_server:
        return InProcess()
    if settings.weight_sync == "none" or isinstance(training, Frozen):
        return Frozen()
    common: dict[str, Any] = {"interval": 1, "tolerance_nats": settings.tolerance_nats}
    if lora_rank is not None:
        return LoraHotswap(**common, server_args={"enable_lora": True})
    gentle = Reload(**common, server_args={}, location=settings.location, pause_mode="keep")
    if spec.client_class.engine_name not in gentle.requires.refused:
        return gentle
    return Reload(**common, server_args={}, location=settings.location, pause_mode="abort")  # of this run, no request is in flight


def check_found(
    spec: EngineSpec | None, weight_sync: WeightSync, model: str, *, dtype: str, lora_rank: int | None, for_environments: bool = False
) -> None:
    """Look at a server that the run does not start, before anything large is loaded.

    Args:
        model, dtype: what it should serve, for the message.
        for_environments: Atropos environments will call it too.

    Raises:
        EngineError: nobody answers there.
        ConfigError: it lacks what weight sync needs; names the command that starts a right one.
    """
    if spec is None or spec.base_url is None:
        return
    server, needs = _found(spec, Path()), weight_sync.requires
    server.start(model)
    control = spec.client_class.control(server)
    control.check_version()
    lack = control.lacks(needs.moves)
    lacks_generate = for_environments and not server.api.has("/generate")
    if lacks_generate:
        lack = "has no POST /generate, which environments call (--middleware offline_grpo_generate.Generate)"
    if lack is None:
        return
    if needs.moves == "nothing" and not lacks_generate:
        log.warning("%s=%s: that server %s; weight_sync=none uses it as it is", server.key, server.base_url, lack)
        return
    message = f"{server.key}={server.base_url}: that server {lack}; see docs/weight_sync.md, Your own server"
    if (launcher := LAUNCHERS.get(spec.client_class.engine_name)) is not None:
        room = {} if lora_rank is None else {"max_lora_rank": room_for(lora_rank)}
        args = {"dtype": dtype, **needs.server_args, **room}
        command = launcher.by_hand(model, server.base_url, has_key=spec.api_key is not None, args=args, env=needs.env)
        message += f". Start one that has it: {command}"
    raise ConfigError(message)


def _found(spec: EngineSpec, log_dir: Path) -> Server:
    return Server(base_url=spec.base_url, api_key=spec.api_key, launcher=None, log_dir=log_dir, key=spec.url_key)


def _deployment(
    spec: EngineSpec,
    server: Server | None,
    weight_sync: WeightSync,
    policy: Policy,
    sampling: SamplingParams,
    sharding: Sharding,
    ranks: Ranks,
) -> Deployment:
    client = build(
        spec.client_node,
        key=spec.key,
        protocol=RolloutClient,
        model=policy.model,
        tokenizer=policy.tokenizer,
        server=server,
        eos_ids=end_ids(policy.causal_lm.generation_config, policy.tokenizer),
        vocab_size=policy.vocab_size,
    )
    inner = deployment.Deployment([engine_of(client, sampling)], weight_sync, sharding.full_weights)
    return RankZeroDeployment(inner, ranks, sharding.lead) if server is not None and ranks.world_size > 1 else inner
