"""Which parts of a run do not go together. The settings of one part are checked in its own `__post_init__`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from offline_grpo import hub
from offline_grpo.config.compose import key_of
from offline_grpo.errors import require
from offline_grpo.eval.statistics import metric_names
from offline_grpo.interfaces import TaskFacts
from offline_grpo.train.advantage.distill import Distill, is_url
from offline_grpo.train.optimizer import AdamW

if TYPE_CHECKING:
    from offline_grpo.config.plan import Plan

OF_OWN_SERVER = ("engine=", "engine.", "placement.engine_devices=", "weight_sync.server_args")
"""Beginnings of overrides that act on a server which the run starts, and on nothing else."""
OF_CLUSTER = ("placement=", "placement.address=")
"""As `OF_OWN_SERVER`, where nothing else of the run is in a Ray cluster."""


def check_plan(plan: Plan) -> None:
    """Raise ConfigError for the first parts that do not go together, with key, value and fix."""
    model = plan.config.model
    adapted = model.lora is not None and model.ref_id in (None, model.train_id)
    fix = "under LoRA the reference is the trained model without its adapters; leave it null"
    is_idle = adapted and plan.advantage.teacher is None
    require(not is_idle or model.ref_device is None, "model.ref_device", model.ref_device, fix)
    plan.advantage.check(plan.config, plan.data.task, plan.data.recorded)
    needs_kl = "ref" in plan.advantage.needs and plan.loss.kl_coef == 0
    fix = "train.advantage needs the reference's logprobs, which a KL penalty loads; set it above 0"
    require(not needs_kl, "train.kl_coef", plan.loss.kl_coef, fix)
    _check_teacher(plan)
    _check_weight_sync(plan)
    _check_quantization(plan)
    _check_cluster(plan)
    _check_sharding(plan)
    _check_metrics(plan)


def _check_teacher(plan: Plan) -> None:
    teacher = plan.advantage.teacher
    if teacher is not None and not is_url(teacher):
        hub.need_model(teacher, "train.advantage.teacher")
    if not isinstance(plan.advantage, Distill) or plan.data.train is None:
        return
    fix = "name a model (folder or Hub id), or the URL of a vLLM server; null is for rollouts that were scored before"
    require(teacher is not None, "train.advantage.teacher", "null", fix)
    fix = "a server tells its logprobs at temperature 1 alone; use 1, or load the teacher here by its id"
    is_right = not is_url(teacher) or plan.sampling.temperature == 1.0
    require(is_right, "generation.temperature", plan.sampling.temperature, fix)


def _check_weight_sync(plan: Plan) -> None:
    sync, needs, engine, rank = plan.weight_sync, plan.weight_sync.requires, plan.engine, plan.lora_rank
    kind, key = engine.engine_class, "weight_sync"
    fix = f"is for {needs.engine.name}, and generation samples from {kind.name}; choose another of either"
    require(issubclass(kind, needs.engine), key, sync.name, fix)
    fix = f"{kind.name} loads weights only where no request is in flight; set weight_sync.pause_mode=abort"
    is_possible = needs.pause_mode is None or needs.pause_mode in kind.pause_modes
    require(is_possible, "weight_sync.pause_mode", needs.pause_mode, fix)
    fix = "moves all weights, and with model.lora only adapters change; use weight_sync=lora_hotswap"
    require(rank is None or needs.moves != "full", key, sync.name, fix)
    fix = "moves LoRA adapters and the policy has none; add model/lora=default, or choose another"
    require(rank is not None or needs.moves != "lora", key, sync.name, fix)
    room = needs.max_lora_rank
    fits = engine.base_url is not None or rank is None or room is None or rank <= room
    fix = f"the adapters have rank {rank}; set it to the next of 16, 32, 64, 128, ..."
    require(fits, "weight_sync.server_args.max_lora_rank", room, fix)
    fix = f"weight_sync={sync.name} starts servers of its own; set it to null, or use another weight_sync"
    require(not needs.own_server or engine.base_url is None, "generation.base_url", engine.base_url, fix)
    is_served = plan.config.model.quantization is not None and engine.launcher is not None
    fix = "a vLLM server with 4-bit weights computes in 16 bits; use bf16, or sample in process"
    precision = plan.config.train.precision
    require(not is_served or precision != "fp32", "train.precision", precision, fix)
    in_flight = plan.config.rollouts.get("in_flight")
    if needs.in_flight:
        can = needs.in_flight[0]
        fix = f"weight_sync={sync.name} does {can} (weight_sync.pause_mode, which follows this key); use {can}"
    else:
        fix = f"weight_sync={sync.name} sends no weights while requests run; use reload, or with LoRA lora_hotswap"
    require(in_flight is None or in_flight in needs.in_flight, "rollouts.in_flight", in_flight, fix)
    key, value = "placement.num_engines", str(engine.num_managed)
    if engine.base_urls:
        key, value = "generation.base_url", str(engine.base_url)
    is_one = max(engine.num_managed, len(engine.base_urls)) < 2
    fix = f"serves one engine: the policy shares its memory; use one, or another weight_sync than {sync.name}"
    require(is_one or not needs.one_engine, key, value, fix)


def _check_quantization(plan: Plan) -> None:
    """Of a server that the run starts; `Engine.check_logprobs` asks others."""
    quantization, sync = plan.server_args.get("quantization"), plan.weight_sync
    fix = f"weight_sync={sync.name} would train the server's own, rounded weights; use ipc, nccl or reload"
    require(quantization is None or not sync.requires.shares_weights, "engine.args.quantization", quantization, fix)
    fix = f"engine.args.quantization={quantization} samples from other probabilities; use token_truncate"
    require(quantization is None or plan.is_corrected, "train.loss.importance_correction", "none", fix)


def _check_cluster(plan: Plan) -> None:
    placement, sync = plan.config.placement, plan.weight_sync
    is_safe = TaskFacts.of(plan.data.task).scores_safely
    fix = "this task's scores are computed in the run's process, as they cannot misbehave; leave it at false"
    require(not (placement.score_on_cluster and is_safe), "placement.score_on_cluster", "true", fix)
    if placement.address is None or plan.engine.launcher is None:
        return
    devices = placement.engine_devices
    fix = "are this machine's, and with placement=ray the cluster gives each server its GPUs; leave it at null"
    require(devices is None, "placement.engine_devices", devices, fix)
    fix = f"weight_sync={sync.name} needs a server on the trainer's GPU; use nccl, reload, or with LoRA lora_hotswap"
    require(sync.requires.placement != "same", "placement.address", placement.address, fix)
    fix = "rollouts=atropos gives its environments one address, and a server may move; use placement=default"
    require(not plan.config.source.has_environments, "placement.address", placement.address, fix)


def _check_sharding(plan: Plan) -> None:
    train, sync = plan.config.train, plan.weight_sync
    if train.sharding != "fsdp2":
        return
    fix = "train.sharding=fsdp2 cannot spread 4-bit weights; use null, or train.sharding=none"
    require(plan.config.model.quantization is None, "model.quantization", "nf4", fix)
    fix = "the server shares whole weights, and train.sharding=fsdp2 spreads them; use nccl, ipc or reload"
    require(not sync.requires.shares_weights, "weight_sync", sync.name, fix)
    is_spread = type(plan.optimizer) is AdamW and not plan.optimizer.offload
    fix = "train.sharding=fsdp2 spreads the state of torch's AdamW alone; use train/optimizer=adamw without offload"
    require(is_spread, "train.optimizer", train.optimizer["_target_"], fix)


def _check_metrics(plan: Plan) -> None:
    config, plain = plan.config, metric_names(plan.config.eval.ks, plan.config.eval.replicates)
    tasks = sorted({problem.task for problem in plan.data.held_out} - {""})
    names = [*plain, *(f"task/{task}/{name}" for task in tasks for name in plain)]
    stop_when = config.train.stop_when.metric if config.train.stop_when.is_active else None
    is_frozen = plan.eval_weight_sync.requires.moves == "nothing"
    for key, metric in ("checkpoint.keep_best", config.checkpoint.keep_best), ("train.stop_when.metric", stop_when):
        if metric is not None:
            require(config.eval.enabled, key, metric, "nothing is measured with eval.enabled=false")
            fix = f"no such evaluation metric; choose one of {', '.join(names)}"
            require(metric.removeprefix("-") in names, key, metric, fix)
            require(not is_frozen, key, metric, "evaluations ask a server that gets no weights (weight_sync=none)")


def idle_overrides(overrides: Sequence[str], rollouts: DictConfig, plan: Plan) -> Iterator[str]:
    """A line for each override of the command line that would do nothing in this run. Values from files are let
    through: those of a preset are meant for runs that start a server too. `rollouts`: the group with its
    interpolations, which say what a source reads of other groups.
    """
    engine, placement = plan.engine, plan.config.placement
    if engine.launcher is None:
        uses_cluster = placement.score_on_cluster or placement.trainer == "ray"
        found = f"the server at generation.base_url={engine.base_url} runs already"
        where, fix = "the run starts no server", "use generation=vllm_server"
        if engine.base_urls:
            where, fix = found, "set generation.base_url=null"
        for setting in (override.lstrip("+~") for override in overrides):
            if setting.startswith(OF_OWN_SERVER if uses_cluster else (*OF_OWN_SERVER, *OF_CLUSTER)):
                yield f"{setting}: {where}, so this would do nothing; leave it out, or {fix}"
    if plan.data.train is None and rollouts.get("environment") is None:  # an environment of the run's reads `data`
        read = OmegaConf.to_yaml(rollouts, resolve=False)
        for override in overrides:
            key = key_of(override)
            if key.startswith("data.") and key != "data.resample_zero_signal" and f"${{{key}}}" not in read:
                yield f"{override}: this source does not read it, so it would do nothing; see conf/rollouts for its own"
