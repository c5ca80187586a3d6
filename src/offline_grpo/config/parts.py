"""From settings to a plan: builds the components that need no model, and refuses what can be refused without one.

This module imports no torch, whose import takes longer than all of the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo import hub
from offline_grpo.config.build import build, check_settings
from offline_grpo.config.engine_spec import EngineSpec, check_urls, evaluation_engine, training_engine
from offline_grpo.config.problems import task_data
from offline_grpo.errors import require
from offline_grpo.interfaces import Advantage, Layout, Loss, LossHead, OptimizerFactory, RunListener
from offline_grpo.logger.profiler import Profiler
from offline_grpo.model.gguf import find_gguf
from offline_grpo.settings import RunConfig
from offline_grpo.types import SamplingParams

if TYPE_CHECKING:
    from offline_grpo.weight_sync.strategy import WeightSync
from offline_grpo.config.plan import Plan


def make_plan(config: RunConfig) -> Plan:
    """Build what needs no model, and check what does against its signature. Raises ConfigError."""
    sampling, client_node = _split_generation(config.generation)
    eval_sampling = evaluation_sampling(config)
    check_urls("generation.base_url", client_node.get("base_url"))
    listeners(config, Path())  # their constructors refuse bad settings
    data = task_data(config)
    for key, name in (("model.train_id", config.model.train_id), ("model.ref_id", config.model.ref_id)):
        if name is not None and (key == "model.train_id" or config.train.kl_coef > 0):
            hub.need_model(name, key)
    if config.model.train_id is None and config.model.gguf_file is not None:
        find_gguf(config.model.gguf_file)
    # From here on torch is imported, then transformers.
    from offline_grpo.config.checks import check_plan
    from offline_grpo.model.layouts import layout_named
    from offline_grpo.weight_sync.strategy import WeightSync

    engine = training_engine(config, client_node)
    api_key, layout = client_node.get("api_key"), config.model.layout
    eval_engine = evaluation_engine(config.eval, engine, api_key=api_key) if config.eval.enabled else None
    weight_sync = build(config.weight_sync, key="weight_sync", protocol=WeightSync)
    engine = engine.with_needs(weight_sync.requires.server_args, weight_sync.requires.env)
    plan = Plan(
        config=config,
        data=data,
        sampling=sampling,
        eval_sampling=eval_sampling,
        engine=engine,
        eval_engine=eval_engine,
        loss=build(config.train.loss, key="train.loss", protocol=Loss),
        advantage=_advantage(config.train.advantage, "train.advantage"),
        optimizer=build(config.train.optimizer, key="train.optimizer", protocol=OptimizerFactory),
        layout=layout_named(layout) if isinstance(layout, str) else build(layout, key="model.layout", protocol=Layout),
        head=build(config.model.head, key="model.head", protocol=LossHead),
        weight_sync=weight_sync,
        eval_weight_sync=_evaluation_sync(eval_engine, config, weight_sync),
    )
    check_plan(plan)
    return plan


def _advantage(node: Any, key: str) -> Advantage:
    """The advantage of a node; the one under `base`, to which distillation adds, is built first."""
    base = node.get("base") if isinstance(node, Mapping) else None
    built = {} if base is None else {"base": _advantage(base, f"{key}.base")}
    return build({**node, **built} if built else node, key=key, protocol=Advantage)


def listeners(config: RunConfig, run_folder: Path) -> list[RunListener]:
    """The components of the groups `logger` and `samples`, and the profiler. They write nothing before they are
    started.
    """
    nodes = {f"logger.{name}": node for name, node in (config.logger or {}).items()}
    nodes |= {} if config.samples is None else {"samples": config.samples}
    found = {key: build(node, key=key, protocol=RunListener, output_dir=run_folder) for key, node in nodes.items()}
    if config.train.profile is not None:
        found["train.profile"] = Profiler(run_folder, config.train.profile - 1)
    return list(found.values())


def _evaluation_sync(spec: EngineSpec | None, config: RunConfig, training: WeightSync) -> WeightSync:
    """The strategy that brings weights to the engine of evaluations; that of training if both share one engine."""
    from offline_grpo.weight_sync.in_process import Frozen, InProcess
    from offline_grpo.weight_sync.lora import LoraHotswap
    from offline_grpo.weight_sync.reload import Reload

    if spec is None:
        return training
    if not spec.needs_server:
        return InProcess()
    if config.eval.weight_sync == "none" or isinstance(training, Frozen):
        return Frozen()
    common: dict[str, Any] = {"interval": 1, "tolerance_nats": config.eval.tolerance_nats}
    if config.model.lora is not None:
        return LoraHotswap(**common, server_args={"enable_lora": True})
    # "abort" finds nothing to abort: none of this run's requests is in flight there during a push
    return Reload(**common, server_args={}, location=config.eval.location, pause_mode="abort")


def _split_generation(node: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """The sampling settings of the `generation` group, and the client's own: they share one flat group, as people type
    them.
    """
    names = [field.name for field in fields(SamplingParams)]
    sampling = _sampling({name: node[name] for name in names if name in node}, "generation")
    if not node.get("allow_truncated_sampling", False):
        fix = "greedy completions of a prompt are all equal and teach nothing; train at a temperature above 0. "
        fix += "For evaluations: eval.temperature=0 eval.replicates=1 eval.ks=[1]"
        require(sampling.temperature > 0, "generation.temperature", 0, fix)
        why = "training on filtered samples biases the policy ratio"
        for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("repetition_penalty", 1)):
            fix = f"set it to {off}, or say that you mean it with generation.allow_truncated_sampling=true"
            require(getattr(sampling, name) == off, f"generation.{name}", getattr(sampling, name), f"{why}; {fix}")
    client = {name: value for name, value in node.items() if name not in (*names, "allow_truncated_sampling")}
    return sampling, client


def _sampling(values: dict[str, Any], key: str) -> SamplingParams:
    check_settings(SamplingParams, values, key, given_at_runtime={})
    sampling = SamplingParams(**{**values, "stop": tuple(values.get("stop", ()))})
    for name, is_good, fix in (
        ("max_new_tokens", sampling.max_new_tokens > 0, "must be at least 1"),
        ("temperature", sampling.temperature >= 0, "must be 0 (greedy) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "a probability in (0, 1]; 1 switches it off"),
        ("top_k", sampling.top_k >= 0, "must be 0 (off) or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "a share of the largest probability, in [0, 1]; 0 switches it off"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "must be above 0; 1 switches it off"),
        ("stop", "" not in sampling.stop, "an empty string is in every text; leave it out"),
    ):
        require(is_good, f"{key}.{name}", getattr(sampling, name), fix)
    return sampling


def evaluation_sampling(config: RunConfig) -> SamplingParams:
    """How evaluations draw completions: the settings of the group `eval`."""
    settings = config.eval
    values = {field.name: getattr(settings, field.name) for field in fields(SamplingParams)}
    sampling = _sampling(values if settings.do_sample else values | {"temperature": 0.0}, "eval")
    fix = "greedy decoding draws one completion over and over; use eval.replicates=1 eval.ks=[1]"
    require(settings.replicates == 1 or sampling.temperature > 0, "eval.replicates", settings.replicates, fix)
    return sampling
