"""Everything that can be found wrong before a model is loaded is found here, and what can be without torch first.

This module imports no torch, whose import takes longer than all of the checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo import hub
from offline_grpo.errors import ConfigError, require
from offline_grpo.eval.pass_at_k import metric_names
from offline_grpo.interfaces import Advantage, Layout, Loss, LossHead, OptimizerFactory, RunListener, Task
from offline_grpo.logger.profiler import Profiler
from offline_grpo.run.build import build, check_settings
from offline_grpo.run.engine_spec import EngineSpec, check_url, check_urls, evaluation_engine, training_engine
from offline_grpo.run.task_data import TaskData, task_data
from offline_grpo.settings import RunConfig
from offline_grpo.train.milestones import watched_metrics
from offline_grpo.train.schedule import LrSchedule
from offline_grpo.types import SamplingParams
from offline_grpo.weight_sync.requirements import check_in_flight, check_requirements

if TYPE_CHECKING:
    from offline_grpo.placement.devices import Devices
    from offline_grpo.weight_sync.strategy import WeightSync


@dataclass(frozen=True)
class Plan:
    """A run's checked ingredients: plain settings and those components that need no model."""

    config: RunConfig
    data: TaskData
    sampling: SamplingParams
    eval_sampling: SamplingParams
    engine: EngineSpec
    eval_engine: EngineSpec | None
    loss: Loss
    advantage: Advantage
    optimizer: OptimizerFactory
    layout: Layout | None  # None: chosen for the device (`model.layout=auto`)
    head: LossHead
    weight_sync: WeightSync
    eval_weight_sync: WeightSync

    @property
    def server_args(self) -> Mapping[str, Any]:
        """The arguments of the server that the run starts, those of the strategy included; empty where it starts none."""
        launcher = self.engine.launcher
        return {} if launcher is None else {**launcher.args, **self.weight_sync.requires.server_args}

    def devices(self, num_processes: int) -> Devices:
        """What placement decides about."""
        from offline_grpo.placement.devices import Devices

        needs = self.weight_sync.requires
        return Devices(
            trainer=self.config.model.device,
            reference=self.config.model.ref_device,
            num_processes=num_processes,
            num_servers=self.engine.num_managed if self.config.placement.address is None else 0,
            gpus_per_server=num_shards(self.server_args),
            engine_devices=self.config.placement.engine_devices,
            strategy=self.weight_sync.name,
            rule=needs.placement,
            needs_gpu=needs.gpu,
        )


def num_shards(server_args: Mapping[str, Any]) -> int:
    """GPUs that a server splits its model over; the option is vLLM's or SGLang's."""
    return server_args.get("tensor_parallel_size") or server_args.get("tp_size") or 1


def make_plan(config: RunConfig) -> Plan:
    """Build what needs no model, and check what does against its signature.

    Raises:
        ConfigError: the first thing that is wrong, with key, value and fix.
    """
    sampling, node = _split_generation(config.generation)
    eval_sampling = evaluation_sampling(config)
    check_urls("generation.base_url", node.get("base_url"))
    check_url("eval.base_url", config.eval.base_url)
    check_url("rollouts.url", config.rollouts.get("url"))
    listeners(config, Path())  # their constructors refuse bad settings
    data = task_data(config)
    names = metric_names(config.eval.ks, config.eval.replicates)
    tasks = sorted({problem.task for problem in data.held_out} - {""})
    watched = watched_metrics(config, [*names, *(f"task/{task}/{name}" for task in tasks for name in names)])
    for key, name in (("model.train_id", config.model.train_id), ("model.ref_id", config.model.ref_id)):
        if name is not None and (key == "model.train_id" or config.train.kl_coef > 0):
            hub.need_model(name, key)
    # From here on torch is imported, then transformers. Whatever can be refused without them has been.
    loss = build(config.train.loss, key="train.loss", protocol=Loss)
    advantage = build(config.train.advantage, key="train.advantage", protocol=Advantage)
    optimizer = build(config.train.optimizer, key="train.optimizer", protocol=OptimizerFactory)
    head = build(config.model.head, key="model.head", protocol=LossHead)

    from offline_grpo.model.reference import check_reference
    from offline_grpo.run.serving import evaluation_sync
    from offline_grpo.weight_sync.strategy import WeightSync

    engine = training_engine(config, node)
    weight_sync = build(config.weight_sync, key="weight_sync", protocol=WeightSync)
    lora_rank = config.model.lora.r if config.model.lora is not None else None
    check_requirements(
        weight_sync.name, weight_sync.requires, engine.client_class, lora_rank=lora_rank, base_url=engine.base_url
    )
    check_reference(config.model)
    _check_number(engine, weight_sync)
    _check_cluster(config, weight_sync, data.task, has_servers=engine.launcher is not None)
    check_in_flight(weight_sync.name, weight_sync.requires, config.rollouts.get("in_flight"))
    eval_engine = evaluation_engine(config.eval, engine, api_key=node.get("api_key")) if config.eval.enabled else None
    eval_weight_sync = evaluation_sync(eval_engine, config.eval, weight_sync, lora_rank=lora_rank)
    fix = "nothing is spread over processes; use full, or train.sharding=fsdp2"
    require(
        config.checkpoint.format == "full" or config.train.sharding == "fsdp2",
        "checkpoint.format",
        config.checkpoint.format,
        fix,
    )
    if config.train.sharding == "fsdp2":
        _check_fsdp2(config, optimizer, weight_sync, (sampling, eval_sampling))
    for key, metric in watched.items():
        is_frozen = eval_weight_sync.requires.moves == "nothing"
        require(not is_frozen, key, metric, "evaluations ask a server that gets no weights (weight_sync=none)")
    return Plan(
        config=config,
        data=data,
        sampling=sampling,
        eval_sampling=eval_sampling,
        engine=engine,
        eval_engine=eval_engine,
        loss=loss,
        advantage=advantage,
        optimizer=optimizer,
        layout=_layout(config.model.layout),
        head=head,
        weight_sync=weight_sync,
        eval_weight_sync=eval_weight_sync,
    )


def _check_number(engine: EngineSpec, weight_sync: WeightSync) -> None:
    fix = f"serves one engine: the policy shares its memory; use one, or another weight_sync than {weight_sync.name}"
    key, value = (
        ("generation.base_url", engine.base_url) if engine.base_urls else ("placement.num_engines", engine.num_managed)
    )
    require(engine.num_servers <= 1 or not weight_sync.requires.one_engine, key, value, fix)


def _check_cluster(config: RunConfig, weight_sync: WeightSync, task: Task, *, has_servers: bool) -> None:
    """Refuse what cannot be in a cluster, or would not be there."""
    key, address = "placement.address", config.placement.address
    settings, scores = config.placement.ray_init, config.placement.score_on_cluster
    if address is None:
        require(not settings, "placement.ray_init", settings, "acts with placement=ray alone; leave it out")
        require(not scores, "placement.score_on_cluster", scores, "acts with placement=ray alone; leave it out")
        return
    fix = "this task's scores are computed in the run's process, as they cannot misbehave; leave it at false"
    require(not scores or not getattr(task, "scores_safely", False), "placement.score_on_cluster", scores, fix)
    fix = "placement.score_on_cluster=true needs processes that score; set 1 or more, for each machine"
    require(not scores or config.scoring.workers > 0, "scoring.workers", config.scoring.workers, fix)
    if not has_servers:
        return
    fix = "are this machine's, and with placement=ray the cluster gives each server its GPUs; leave it at null"
    devices = config.placement.engine_devices
    require(devices is None, "placement.engine_devices", devices, fix)
    fix = f"weight_sync={weight_sync.name} needs a server on the trainer's own GPU; use nccl, or reload, or with LoRA lora_hotswap"
    require(weight_sync.requires.placement != "same", key, address, fix)
    fix = (
        "rollouts=atropos tells its environments one address, and a server in a cluster may move; use placement=default"
    )
    require(config.rollouts.get("url") is None, key, address, fix)


def _check_fsdp2(
    config: RunConfig, optimizer: OptimizerFactory, weight_sync: WeightSync, samplings: Sequence[SamplingParams]
) -> None:
    """Raise ConfigError where a part of the run needs whole weights."""
    from offline_grpo.train.optimizer import AdamW

    name, precision = config.train.optimizer["_target_"], config.train.precision
    for is_wrong, key, value, fix in (
        (
            weight_sync.requires.shares_weights,
            "weight_sync",
            weight_sync.name,
            "the server shares whole weights, and train.sharding=fsdp2 spreads them over the processes; use weight_sync=nccl (a GPU of its "
            "own for the server), ipc (the same GPU) or reload",
        ),
        (
            precision == "fp16",
            "train.precision",
            precision,
            "its loss scaling is not spread (train.sharding=fsdp2); use bf16 or fp32",
        ),
        (
            type(optimizer) is not AdamW or optimizer.offload,
            "train.optimizer",
            name,
            "train.sharding=fsdp2 spreads the state of torch's AdamW alone; use train/optimizer=adamw train.optimizer.offload=false",
        ),
        (
            bool(weight_sync.requires.engines) and any(s.temperature > 0 and not s.is_full_softmax for s in samplings),
            "train.sharding",
            "fsdp2",
            "the probe of a push cannot follow top_p, top_k and repetition_penalty; leave them out, or use train.sharding=none",
        ),
    ):
        require(not is_wrong, key, value, fix)


def listeners(config: RunConfig, run_folder: Path) -> list[RunListener]:
    """The components of the groups `logger` and `samples`, and the profiler. They write nothing before they are
    started.

    Raises:
        ConfigError: see `build`, and their constructors.
    """
    nodes = {f"logger.{name}": node for name, node in (config.logger or {}).items()}
    nodes |= {} if config.samples is None else {"samples": config.samples}
    found = {key: build(node, key=key, protocol=RunListener, output_dir=run_folder) for key, node in nodes.items()}
    if config.train.profile is not None:
        found["train.profile"] = Profiler(run_folder, config.train.profile - 1)
    return list(found.values())


def _layout(value: str | Mapping[str, Any]) -> Layout | None:
    """The layout that `model.layout` names or, as a node with `_target_`, describes."""
    from offline_grpo.model.layouts import layout_named

    return layout_named(value) if isinstance(value, str) else build(value, key="model.layout", protocol=Layout)


def _split_generation(node: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """The sampling settings of the `generation` group, and the client's own: they share one flat group, as people type
    them.
    """
    names = [field.name for field in fields(SamplingParams)]
    sampling = _sampling({name: node[name] for name in names if name in node}, "generation")
    if not sampling.is_full_softmax and not node.get("allow_truncated_sampling", False):
        raise ConfigError(_truncated_sampling_message(sampling))
    client = {name: value for name, value in node.items() if name not in names and name != "allow_truncated_sampling"}
    return sampling, client


def _sampling(values: dict[str, Any], key: str) -> SamplingParams:
    check_settings(SamplingParams, values, key, given_at_runtime={})
    sampling = SamplingParams(**{**values, "stop": tuple(values.get("stop", ()))})
    for name, is_good, fix in (
        ("max_new_tokens", sampling.max_new_tokens > 0, "must be at least 1"),
        ("temperature", sampling.temperature >= 0, "must be 0 (greedy) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "a probability in (0, 1]; 1 switches it off"),
        ("top_k", sampling.top_k >= 0, "must be 0 (off) or more"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "must be above 0; 1 switches it off"),
    ):
        require(is_good, f"{key}.{name}", getattr(sampling, name), fix)
    require(
        "" not in sampling.stop, f"{key}.stop", list(sampling.stop), "an empty string is in every text; leave it out"
    )
    return sampling


def _truncated_sampling_message(sampling: SamplingParams) -> str:
    off = SamplingParams(max_new_tokens=1)
    changed = [
        name for name in ("top_p", "top_k", "repetition_penalty") if getattr(sampling, name) != getattr(off, name)
    ]
    if not changed:
        return "generation.temperature=0: greedy completions of a prompt are all equal and teach nothing; train at a temperature above 0"
    name = changed[0]
    return (
        f"generation.{name}={getattr(sampling, name)}: training on filtered samples biases the policy ratio, because the trainer scores "
        f"tokens under the whole distribution; set generation.{name}={getattr(off, name):g}, or say that you mean it with "
        "generation.allow_truncated_sampling=true"
    )


def evaluation_sampling(config: RunConfig) -> SamplingParams:
    """How evaluations draw completions: the settings of the group `eval`."""
    names = [field.name for field in fields(SamplingParams)]
    values = {name: getattr(config.eval, name) for name in names}
    if not config.eval.do_sample:
        values["temperature"] = 0.0
    return _sampling(values, "eval")


def fresh_schedule(config: RunConfig) -> LrSchedule:
    """How the learning rate goes in a run that is not resumed."""
    num_updates = config.train.iterations * config.planned_updates
    return LrSchedule(kind=config.train.schedule, num_updates=num_updates, warmup_steps=config.train.warmup_steps)
