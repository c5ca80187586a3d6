"""Which parts of a run do not go together. The settings of one part are checked in its own `__post_init__`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from offline_grpo.eval.pass_at_k import metric_names
from offline_grpo.run.config import key_of
from offline_grpo.run.engine_spec import EngineSpec
from offline_grpo.train.optimizer import AdamW

if TYPE_CHECKING:
    from offline_grpo.run.plan import Plan

OF_OWN_SERVER = ("engine=", "engine.", "placement.engine_devices=", "weight_sync.server_args")
"""Beginnings of overrides that act on a server which the run starts, and on nothing else."""
OF_CLUSTER = ("placement=", "placement.address=")
"""As `OF_OWN_SERVER`, where nothing else of the run is in a Ray cluster."""


def problems(plan: Plan) -> Iterator[str]:
    """Every problem of a plan, as `KEY=VALUE: what to do`."""
    config = plan.config
    adapted = config.model.lora is not None and config.model.ref_id in (None, config.model.train_id)
    if adapted and config.model.ref_device is not None:
        fix = "under LoRA the reference is the trained model without its adapters; leave it null"
        yield f"model.ref_device={config.model.ref_device}: {fix}"
    for is_wrong, key, value, fix in (
        *_of_weight_sync(plan),
        *_of_servers(plan),
        *_of_cluster(plan),
        *_of_sharding(plan),
        *_of_metrics(plan),
    ):
        if is_wrong:
            yield f"{key}={value}: {fix}"


Rule = tuple[bool, str, object, str]
"""Whether it is broken, the key, its value and what to do."""


def _of_weight_sync(plan: Plan) -> Iterator[Rule]:
    sync, needs, engine, rank = plan.weight_sync, plan.weight_sync.requires, plan.engine, plan.lora_rank
    name, key = engine.client_class.engine_name, "weight_sync"
    if name in needs.refused:
        yield True, *needs.refused[name]
        return
    fix = (
        "moves no weights, and these samples do not come from the trained module; use reload, or with LoRA lora_hotswap"
    )
    yield not needs.engines and name is not None, key, sync.name, fix
    fix = f"is for a {' or '.join(needs.engines)} server; use another generation, or another weight_sync"
    yield bool(needs.engines) and name not in needs.engines, key, sync.name, fix
    fix = "moves all weights, and with model.lora only adapters change; use weight_sync=lora_hotswap"
    yield rank is not None and needs.moves == "full", key, sync.name, fix
    fix = "moves LoRA adapters and the policy has none; add model/lora=default, or choose another"
    yield rank is None and needs.moves == "lora", key, sync.name, fix
    room = needs.max_lora_rank
    is_small = engine.base_url is None and rank is not None and room is not None and rank > room
    fix = f"the adapters have rank {rank}; set it to the next of 16, 32, 64, 128, ..."
    yield is_small, "weight_sync.server_args.max_lora_rank", room, fix
    fix = (
        f"weight_sync={sync.name} starts servers of its own again and again; set it to null, or use another weight_sync"
    )
    yield needs.own_server and engine.base_url is not None, "generation.base_url", engine.base_url, fix
    in_flight = plan.config.rollouts.get("in_flight")
    if needs.in_flight:
        can = needs.in_flight[0]
        fix = f"weight_sync={sync.name} does {can} (weight_sync.pause_mode, which follows this key); use {can}"
    else:
        fix = f"weight_sync={sync.name} sends no weights while requests run; use reload, or with LoRA lora_hotswap"
    yield in_flight is not None and in_flight not in needs.in_flight, "rollouts.in_flight", in_flight, fix


def _of_servers(plan: Plan) -> Iterator[Rule]:
    engine, sync = plan.engine, plan.weight_sync
    key, value = (
        ("generation.base_url", engine.base_url) if engine.base_urls else ("placement.num_engines", engine.num_managed)
    )
    is_wrong = engine.num_servers > 1 and sync.requires.one_engine
    fix = f"serves one engine: the policy shares its memory; use one, or another weight_sync than {sync.name}"
    yield is_wrong, key, value, fix


def _of_cluster(plan: Plan) -> Iterator[Rule]:
    placement, sync = plan.config.placement, plan.weight_sync
    if placement.address is None:
        return
    scores = placement.score_on_cluster
    is_safe = getattr(plan.data.task, "scores_safely", False)
    fix = "this task's scores are computed in the run's process, as they cannot misbehave; leave it at false"
    yield scores and is_safe, "placement.score_on_cluster", scores, fix
    if plan.engine.launcher is None:
        return
    devices = placement.engine_devices
    fix = "are this machine's, and with placement=ray the cluster gives each server its GPUs; leave it at null"
    yield devices is not None, "placement.engine_devices", devices, fix
    fix = f"weight_sync={sync.name} needs a server on the trainer's GPU; use nccl, reload, or with LoRA lora_hotswap"
    yield sync.requires.placement == "same", "placement.address", placement.address, fix
    fix = "rollouts=atropos gives its environments one address, and a server may move; use placement=default"
    yield plan.config.rollouts.get("url") is not None, "placement.address", placement.address, fix


def _of_sharding(plan: Plan) -> Iterator[Rule]:
    train, sync = plan.config.train, plan.weight_sync
    if train.sharding != "fsdp2":
        return
    fix = "the server shares whole weights, and train.sharding=fsdp2 spreads them; use nccl, ipc or reload"
    yield sync.requires.shares_weights, "weight_sync", sync.name, fix
    is_other = type(plan.optimizer) is not AdamW or plan.optimizer.offload
    fix = "train.sharding=fsdp2 spreads the state of torch's AdamW alone; use train/optimizer=adamw without offload"
    yield is_other, "train.optimizer", train.optimizer["_target_"], fix


def _of_metrics(plan: Plan) -> Iterator[Rule]:
    config, plain = plan.config, metric_names(plan.config.eval.ks, plan.config.eval.replicates)
    tasks = sorted({problem.task for problem in plan.data.held_out} - {""})
    names = [*plain, *(f"task/{task}/{name}" for task in tasks for name in plain)]
    stop_when = config.train.stop_when.metric if config.train.stop_when.is_active else None
    is_frozen = plan.eval_weight_sync.requires.moves == "nothing"
    watched = {"checkpoint.keep_best": config.checkpoint.keep_best, "train.stop_when.metric": stop_when}
    for key, metric in watched.items():
        if metric is not None:
            yield not config.eval.enabled, key, metric, "nothing is measured with eval.enabled=false"
            fix = f"no such evaluation metric; choose one of {', '.join(names)}"
            yield metric.removeprefix("-") not in names, key, metric, fix
            yield is_frozen, key, metric, "evaluations ask a server that gets no weights (weight_sync=none)"


def idle_overrides(overrides: Sequence[str], cfg: DictConfig, plan: Plan) -> Iterator[str]:
    """Every override of the command line that would do nothing in this run.

    Values from files are let through: those of a preset are meant for runs that start a server too.

    Args:
        cfg: the composed configuration, whose interpolations are not resolved.
    """
    if plan.engine.launcher is None:
        yield from _without_own_server(overrides, plan.engine, uses_cluster=_uses_cluster(plan))
    if plan.data.train is None and cfg.rollouts.get("environment") is None:  # an environment of the run's reads `data`
        read = OmegaConf.to_yaml(cfg.rollouts, resolve=False)
        for override in overrides:
            key = key_of(override)
            if key.startswith("data.") and key != "data.resample_zero_signal" and f"${{{key}}}" not in read:
                yield f"{override}: this source does not read it, so it would do nothing; see conf/rollouts for its own"


def _uses_cluster(plan: Plan) -> bool:
    """Whether something else than servers is in the Ray cluster."""
    return plan.config.placement.score_on_cluster or plan.config.placement.trainer == "ray"


def _without_own_server(overrides: Sequence[str], engine: EngineSpec, *, uses_cluster: bool) -> Iterator[str]:
    url = engine.base_url
    where = "the run starts no server" if url is None else f"the server at generation.base_url={url} runs already"
    for setting in (override.lstrip("+~") for override in overrides):
        if setting.startswith(OF_OWN_SERVER if uses_cluster else (*OF_OWN_SERVER, *OF_CLUSTER)):
            yield f"{setting}: {where}, so this would do nothing; leave it out, or set generation.base_url=null"
