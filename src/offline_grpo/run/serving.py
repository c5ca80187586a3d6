"""Builds the deployments of training and evaluation: rollout clients, their servers, and what keeps the weights
current.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.engine.engine import engine_of
from offline_grpo.engine.server import Server
from offline_grpo.engine.sglang import SglangEngine
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Deployment, RolloutClient, Sharding
from offline_grpo.model.dtypes import TORCH_NAMES
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import end_ids
from offline_grpo.placement.devices import Devices, server_gpus, trainer_gpus
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
from offline_grpo.weight_sync.requirements import SyncRequirements
from offline_grpo.weight_sync.strategy import WeightSync

if TYPE_CHECKING:
    from offline_grpo.engine.ray_cluster import RayCluster
    from offline_grpo.run.preflight import Plan

log = logging.getLogger(__name__)

LAUNCHERS = {launcher.name: launcher for launcher in (VllmEngine, SglangEngine)}
"""How a server of each kind is started."""


def training_servers(
    spec: EngineSpec,
    weight_sync: WeightSync,
    *,
    run_folder: Path,
    gpus: Sequence[Sequence[int] | None],
    ranks: Ranks,
    cluster: Callable[[], RayCluster] | None = None,
) -> list[Server]:
    """The servers that `generation` samples from, not started yet; empty where it samples in this process.

    Args:
        gpus: that each server which the run starts may see; None: all that this process sees.
        cluster: reserves room for them elsewhere; None: they start on this machine. Called by the first process.
    """
    servers: list[Server] = _found(spec, run_folder) if spec.base_urls else []

    def make() -> list[tuple[str, str | None]]:
        if spec.launcher is not None:
            about: dict[str, Any] = {
                "args": weight_sync.requires.server_args,
                "env": weight_sync.requires.env,
                "log_numbers": count(),
            }
            about |= {"launcher": spec.launcher, "log_dir": run_folder}
            if cluster is not None:
                room = cluster()
                servers.extend(room.server(**about, number=number) for number in range(spec.num_managed))
            else:
                servers.extend(
                    Server(base_url=None, api_key=None, **about, number=number, gpus=own)
                    for number, own in enumerate(gpus)
                )
        return [(server.base_url, server.api_key) for server in servers]

    addresses = ranks.on_main(make)
    return servers or [Server(base_url=url, api_key=key, launcher=None, log_dir=run_folder) for url, key in addresses]


def cluster_of(plan: Plan, stack: ExitStack) -> Callable[[], RayCluster] | None:
    """Reserves room for the servers in a Ray cluster; None where they start on this machine."""
    address, settings = plan.config.placement.address, plan.config.placement.ray_init
    if address is None:
        return None
    from offline_grpo.engine.ray_cluster import RayCluster
    from offline_grpo.run.preflight import num_shards

    def reserve() -> RayCluster:
        size = {"num_servers": plan.engine.num_managed, "gpus_per_server": num_shards(plan.server_args)}
        cluster = RayCluster(address, settings, **size)
        stack.callback(cluster.close)
        return cluster

    return reserve


def starts_before_the_policy(spec: EngineSpec, weight_sync: WeightSync, devices: Devices) -> bool:
    """Whether the servers may start before the policy is loaded."""
    needs_policy = isinstance(weight_sync, LoraRestart)  # its command line names the adapter
    tells = spec.launcher is not None and spec.launcher.tells_of_memory
    return not needs_policy and (tells or not loads_onto_servers_gpu(weight_sync, devices))


def loads_onto_servers_gpu(weight_sync: WeightSync, devices: Devices) -> bool:
    """Whether the policy is loaded onto a GPU of a server, and so not before that has taken its memory
    (`Server.wait_for_memory`).
    """
    trainers = trainer_gpus(devices.trainer, devices.num_processes)
    is_shared = any(own is None or gpu in own for own in server_gpus(devices) for gpu in trainers)
    return is_shared and not weight_sync.requires.shares_weights


def for_training(
    spec: EngineSpec,
    servers: Sequence[Server],
    weight_sync: WeightSync,
    policy: Policy,
    *,
    sampling: SamplingParams,
    sharding: Sharding,
    ranks: Ranks,
) -> Deployment:
    """The engines of `generation` and the strategy of `weight_sync`, not connected yet.

    Args:
        servers: see `training_servers`.
        sampling: the settings of training.
    """
    return _deployment(spec, servers, weight_sync, policy, sampling, sharding, ranks)


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
    return _deployment(spec, _found(spec, run_folder), weight_sync, policy, sampling, sharding, ranks)


def evaluation_sync(
    spec: EngineSpec | None, settings: EvalConfig, training: WeightSync, *, lora_rank: int | None
) -> WeightSync:
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
    return Reload(
        **common, server_args={}, location=settings.location, pause_mode="abort"
    )  # of this run, no request is in flight


def check_found_servers(plan: Plan, model_id: str, ranks: Ranks) -> None:
    """See `check_found`. Of a model with adapters, a server has the base."""
    lora = plan.config.model.lora
    about = {"dtype": TORCH_NAMES[plan.config.train.precision], "lora_rank": None if lora is None else lora.r}
    of_training = {**about, "for_environments": plan.config.rollouts.get("url") is not None}
    ranks.on_main(lambda: check_found(plan.engine, plan.weight_sync, model_id, **of_training))
    ranks.on_main(lambda: check_found(plan.eval_engine, plan.eval_weight_sync, model_id, **about))


def check_found(
    spec: EngineSpec | None,
    weight_sync: WeightSync,
    model: str,
    *,
    dtype: str,
    lora_rank: int | None,
    for_environments: bool = False,
) -> None:
    """Look at servers that the run does not start, before anything large is loaded.

    Args:
        model, dtype: what it should serve, for the message.
        for_environments: Atropos environments will call it too.

    Raises:
        EngineError: nobody answers there.
        ConfigError: it lacks what weight sync needs; names the command that starts a right one.
    """
    for server in [] if spec is None else _found(spec, Path()):
        assert spec is not None
        _check_server(
            server,
            spec,
            weight_sync.requires,
            model,
            dtype=dtype,
            lora_rank=lora_rank,
            for_environments=for_environments,
        )


def _check_server(
    server: Server,
    spec: EngineSpec,
    needs: SyncRequirements,
    model: str,
    *,
    dtype: str,
    lora_rank: int | None,
    for_environments: bool,
) -> None:
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


def _found(spec: EngineSpec, log_dir: Path) -> list[Server]:
    common: dict[str, Any] = {"api_key": spec.api_key, "launcher": None, "log_dir": log_dir, "key": spec.url_key}
    return [Server(base_url=url, **common) for url in spec.base_urls]


def _deployment(
    spec: EngineSpec,
    servers: Sequence[Server],
    weight_sync: WeightSync,
    policy: Policy,
    sampling: SamplingParams,
    sharding: Sharding,
    ranks: Ranks,
) -> Deployment:
    clients = [
        build(
            spec.client_node,
            key=spec.key,
            protocol=RolloutClient,
            model=policy.model,
            tokenizer=policy.tokenizer,
            server=server,
            eos_ids=end_ids(policy.causal_lm.generation_config, policy.tokenizer),
            vocab_size=policy.vocab_size,
        )
        for server in servers or [None]
    ]
    inner = deployment.Deployment(
        [engine_of(client, sampling) for client in clients], weight_sync, sharding.full_weights
    )
    return RankZeroDeployment(inner, ranks, sharding.lead) if servers and ranks.world_size > 1 else inner
