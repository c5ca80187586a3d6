"""Builds the deployments of training and evaluation: rollout clients, their servers, and what keeps the weights
current.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from offline_grpo.config.engine_spec import EngineSpec, num_shards
from offline_grpo.config.parts import Plan
from offline_grpo.engine.ray_server import RayCluster
from offline_grpo.engine.server import Server
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.model.device import TORCH_NAMES
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import end_ids
from offline_grpo.placement.devices import Devices, server_gpus, trainer_gpus
from offline_grpo.placement.ranks import Ranks
from offline_grpo.train.sharding import Sharding
from offline_grpo.types import SamplingParams
from offline_grpo.weight_sync.deployment import Deployment, RankZeroDeployment
from offline_grpo.weight_sync.lora import LoraRestart, room_for
from offline_grpo.weight_sync.strategy import WeightSync

log = logging.getLogger(__name__)


def check_found_servers(plan: Plan, model_id: str) -> None:
    """Look at servers that the run does not start, before anything large is loaded.

    Args:
        model_id: the model that they should serve, for the message. Of a model with adapters, a server has the base.

    Raises:
        EngineError: nobody answers there.
        ConfigError: a server lacks what weight sync needs; names the command that starts a right one.
    """
    asked = [(plan.engine, plan.weight_sync)]
    asked += [] if plan.eval_engine is None else [(plan.eval_engine, plan.eval_weight_sync)]
    for spec, weight_sync in asked:
        for server in found_servers(spec, Path()):
            engine = spec.engine(server=server, eos_ids=(), vocab_size=0)
            command = _command(plan, weight_sync, model_id, engine)
            try:
                server.start(model_id)
            except EngineError as error:
                raise EngineError(f"{error}; this starts one: {command}") from error
            engine.check_version()
            lack = engine.lacks(weight_sync.requires.moves)
            asked_by_environments = spec is plan.engine and plan.config.rollouts.get("url") is not None
            if asked_by_environments and not server.api.has("/generate"):
                lack = "has no POST /generate, which environments call (--middleware offline_grpo_generate.Generate)"
            elif lack is not None and weight_sync.requires.moves == "nothing":
                log.warning(
                    "%s=%s: that server %s; weight_sync=none uses it as it is", server.key, server.base_url, lack
                )
                continue
            if lack is not None:
                fix = f"that server {lack}; see docs/weight_sync.md, Your own server. Start one that has it: {command}"
                raise ConfigError(f"{server.key}={server.base_url}: {fix}")


def _command(plan: Plan, weight_sync: WeightSync, model_id: str, engine: ServerEngine) -> str:
    """What starts a server that has what weight sync needs, at the address of the engine's."""
    needs, room = weight_sync.requires, {} if plan.lora_rank is None else {"max_lora_rank": room_for(plan.lora_rank)}
    args = {"port": urlsplit(engine.server.base_url).port, "dtype": TORCH_NAMES[plan.config.train.precision]}
    args |= {} if plan.config.model.quantization is None else {"quantization": "bitsandbytes"}
    words = engine.start_words(model_id, args, {**needs.server_args, **room})
    env = [f"{name}={shlex.quote(value)}" for name, value in needs.env.items()]
    return " ".join([*env, shlex.join(["python", "-m", *words])])


def found_servers(spec: EngineSpec, log_dir: Path) -> list[Server]:
    """The servers that the settings name, which the run does not start."""
    return [
        Server(base_url=url, api_key=spec.api_key, launcher=None, log_dir=log_dir, key=spec.url_key)
        for url in spec.base_urls
    ]


def training_servers(
    plan: Plan, gpus: Sequence[Sequence[int] | None], run_folder: Path, ranks: Ranks, stack: ExitStack
) -> list[Server]:
    """The servers that `generation` samples from, not started yet; empty where it samples in this process.

    Args:
        gpus: that each server which the run starts on this machine may see; None: all that this process sees.
        stack: gets what has to be let go of.
    """
    servers = found_servers(plan.engine, run_folder)

    def make() -> list[tuple[str, str | None]]:
        if plan.engine.launcher is not None:
            server, needs = server_maker(plan, gpus, stack), plan.weight_sync.requires
            about = {"launcher": plan.engine.launcher, "args": needs.server_args, "env": needs.env}
            about |= {"log_dir": run_folder, "log_numbers": count()}
            servers.extend(server(number=number, **about) for number in range(plan.engine.num_managed))
        return [(server.base_url, server.api_key) for server in servers]

    addresses = ranks.on_main(make)
    if not servers:
        servers = [Server(base_url=url, api_key=key, log_dir=run_folder) for url, key in addresses]
    for each in servers:
        stack.callback(each.stop)
    return servers


def server_maker(plan: Plan, gpus: Sequence[Sequence[int] | None], stack: ExitStack) -> Callable[..., Server]:
    """Makes a server of this machine, or of the Ray cluster, in which room is reserved now."""
    placement = plan.config.placement
    if placement.address is None:
        return lambda number, **about: Server(base_url=None, api_key=None, number=number, gpus=gpus[number], **about)
    cluster = RayCluster(
        placement.address,
        placement.ray_init,
        num_servers=plan.engine.num_managed,
        gpus_per_server=num_shards(plan.server_args),
    )
    stack.callback(cluster.close)
    return cluster.server


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


def deployments(
    plan: Plan, servers: Sequence[Server], policy: Policy, sharding: Sharding, run_folder: Path, ranks: Ranks
) -> tuple[Deployment, Deployment]:
    """What training samples from and what evaluations ask, which may be the same; not connected yet.

    Args:
        servers: see `training_servers`.
    """

    def deployment(
        spec: EngineSpec, servers: Sequence[Server], sync: WeightSync, sampling: SamplingParams
    ) -> Deployment:
        runtime = {"model": policy.model, "tokenizer": policy.tokenizer, "vocab_size": policy.vocab_size}
        runtime["eos_ids"] = end_ids(policy.causal_lm.generation_config, policy.tokenizer)
        runtime |= {"sampling": sampling, "is_corrected": plan.is_corrected or spec is plan.eval_engine}
        engines = [spec.engine(server=server, **runtime) for server in servers or [None]]
        if servers and ranks.world_size > 1:
            return RankZeroDeployment(engines, sync, sharding.full_weights, ranks, sharding.lead)
        return Deployment(engines, sync, sharding.full_weights)

    training = deployment(plan.engine, servers, plan.weight_sync, plan.sampling)
    if plan.eval_engine is None:
        return training, training
    found = found_servers(plan.eval_engine, run_folder)
    return training, deployment(plan.eval_engine, found, plan.eval_weight_sync, plan.eval_sampling)
