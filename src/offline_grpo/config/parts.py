"""The plan of a run: its settings, and its parts that need no model. `make_plan` builds them, and refuses what can be
refused without a model. The settings of one part are checked in its own `__post_init__`.

This module imports no torch, whose import takes longer than all of the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from offline_grpo import hub
from offline_grpo.config.build import build, check_signature
from offline_grpo.config.compose import key_of
from offline_grpo.config.engine_spec import EngineSpec, evaluation_engine, num_shards, training_engine, urls_of
from offline_grpo.config.problems import TaskData, task_data
from offline_grpo.errors import ConfigError
from offline_grpo.eval.statistics import metric_names
from offline_grpo.interfaces import Advantage, Layout, Loss, LossHead, OptimizerFactory, RunListener, TaskFacts
from offline_grpo.logger.profiler import Profiler
from offline_grpo.model.gguf import find_gguf
from offline_grpo.settings import RunConfig
from offline_grpo.types import SamplingParams

if TYPE_CHECKING:
    from offline_grpo.placement.devices import Devices
    from offline_grpo.weight_sync.strategy import WeightSync

OF_OWN_SERVER = ("engine=", "engine.", "placement.engine_devices=", "weight_sync.server_args")
"""Beginnings of overrides that act on a server which the run starts, and on nothing else."""
OF_CLUSTER = ("placement=", "placement.address=")
"""As `OF_OWN_SERVER`, where nothing else of the run is in a Ray cluster."""
LARGEST_SET = 512
"""The top_k of training, where other filters come without one."""
TINY_ANSWER = 16
"""Tokens that hold an answer of the tiny model, and of hardly any other."""


@dataclass
class Plan:
    """A run's checked ingredients: plain settings and those components that need no model."""

    config: RunConfig
    data: TaskData  # the start isolates its task, and leaves out problems whose prompts are too long
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
        """The arguments of the server that the run starts; empty if it starts none."""
        return {} if self.engine.launcher is None else self.engine.launcher.args

    @property
    def lora_rank(self) -> int | None:
        lora = self.config.model.lora
        return None if lora is None else lora.r

    @property
    def is_corrected(self) -> bool:
        """Whether training allows for a server whose format makes other probabilities than the trainer's."""
        corrects = self.loss.ratio_reference == "rollout" or getattr(self.loss, "importance_correction", None) != "none"
        return corrects or self.config.model.quantization is not None  # the server computes with the same 4 bits

    def devices(self, num_processes: int) -> Devices:
        """Raises ConfigError for GPUs that this machine has not, or that do not suit the weight sync."""
        from offline_grpo.placement.devices import place

        needs = self.weight_sync.requires
        return place(
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


def make_plan(config: RunConfig) -> Plan:
    """Build what needs no model: each part is checked against the signature of its class, and checks its settings.
    Raises ConfigError.
    """
    # What needs no import: how completions are drawn, addresses, loggers, the problems, and where the model is.
    sampling, eval_sampling = sampling_of(config, "generation"), sampling_of(config, "eval")
    urls_of("generation.base_url", config.generation.get("base_url"))
    listeners(config, Path())  # their constructors refuse bad settings
    data = task_data(config)
    for key, name in (("model.train_id", config.model.train_id), ("model.ref_id", config.model.ref_id)):
        if name is not None and (key == "model.train_id" or config.train.kl_coef > 0):
            hub.need_model(name, key)
    if config.model.train_id is None and config.model.gguf_file is not None:
        find_gguf(config.model.gguf_file)

    # From here on torch is imported, then transformers.
    from offline_grpo.model.layouts import layout_named
    from offline_grpo.weight_sync.in_process import Frozen, InProcess
    from offline_grpo.weight_sync.lora import LoraHotswap
    from offline_grpo.weight_sync.reload import Reload
    from offline_grpo.weight_sync.strategy import WeightSync

    # What training samples from, with what its weight sync adds to a server's command line (`engine.env` wins).
    engine, layout = training_engine(config), config.model.layout
    weight_sync = build(config.weight_sync, key="weight_sync", protocol=WeightSync)
    needs, launcher = weight_sync.requires, engine.launcher
    if launcher is not None:
        args, env = {**launcher.args, **needs.server_args}, {**needs.env, **launcher.env}
        args |= {"enable_return_routed_experts": True} if sampling.needs_routes else {}
        engine = replace(engine, launcher=replace(launcher, args=args, env=env))

    # What evaluations ask, and how the weights get there: as to training's engine if that is the one.
    eval_engine = evaluation_engine(config, engine) if config.eval.enabled else None
    common: dict[str, Any] = {"interval": 1, "tolerance_nats": config.eval.tolerance_nats}
    if eval_engine is None:
        eval_weight_sync = weight_sync
    elif not eval_engine.needs_server:
        eval_weight_sync = InProcess()
    elif config.eval.weight_sync == "none" or isinstance(weight_sync, Frozen):
        eval_weight_sync = Frozen()
    elif config.model.lora is not None:
        eval_weight_sync = LoraHotswap(**common, share_base=False, server_args={"enable_lora": True})
    else:  # "abort" finds nothing to abort: none of this run's requests is in flight there during a push
        eval_weight_sync = Reload(**common, server_args={}, location=config.eval.location, pause_mode="abort")

    return Plan(
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
        eval_weight_sync=eval_weight_sync,
    )


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
    found = [build(node, key=key, protocol=RunListener, output_dir=run_folder) for key, node in nodes.items()]
    return found + ([] if config.train.profile is None else [Profiler(run_folder, config.train.profile - 1)])


def sampling_of(config: RunConfig, key: str) -> SamplingParams:
    """How training draws completions (the group "generation"), or evaluations ("eval"). Raises ConfigError."""
    settings = config.generation if key == "generation" else vars(config.eval)
    values = {each.name: settings[each.name] for each in fields(SamplingParams) if each.name in settings}
    if not settings.get("do_sample", True):
        values["temperature"] = 0.0
    check_signature(SamplingParams, values, key, given_at_runtime={})
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
        if not is_good:
            raise ConfigError(f"{key}.{name}", getattr(sampling, name), fix)

    # Evaluations may be greedy, once for each problem. What training draws must come from a distribution of the policy.
    if key == "eval":
        if settings["replicates"] > 1 and sampling.temperature == 0:
            fix = "greedy decoding draws one completion over and over; use eval.replicates=1 eval.ks=[1]"
            raise ConfigError("eval.replicates", settings["replicates"], fix)
    elif not settings.get("allow_truncated_sampling", False):
        for name, is_greedy in (("temperature", sampling.temperature == 0), ("top_k", sampling.top_k == 1)):
            if is_greedy:
                fix = "greedy completions of a prompt are all equal and teach nothing; train at a temperature above 0. "
                fix += "For evaluations: eval.temperature=0 eval.replicates=1 eval.ks=[1]"
                raise ConfigError(f"generation.{name}", getattr(sampling, name), fix)
        if (penalty := sampling.repetition_penalty) != 1:
            why = "training on samples with a penalty biases the policy ratio; set it to 1, or say that you mean it"
            raise ConfigError(
                "generation.repetition_penalty", penalty, f"{why} with generation.allow_truncated_sampling=true"
            )

    # Training scores each token among those that filters left, so these are recorded, and must not be too many.
    sampling = replace(sampling, needs_routes=key == "generation" and config.model.router_replay == "rollout")
    if key == "generation" and sampling.has_filters and sampling.temperature > 0:
        return replace(sampling, top_k=sampling.top_k or LARGEST_SET, needs_alternatives=True)
    return sampling


# Which parts do not go together.


def check_settings(plan: Plan, overrides: Sequence[str] = (), rollouts: DictConfig | None = None) -> None:
    """Raise ConfigError for the first parts that do not go together, with key, value and fix.

    Args:
        overrides: what was typed, of which nothing may be without effect. Settings in files and presets may be.
        rollouts: the group, with interpolations not resolved.
    """
    from offline_grpo.train.advantage import Distill, is_url
    from offline_grpo.train.optimizer import AdamW

    config, data, sync, engine = plan.config, plan.data, plan.weight_sync, plan.engine
    model, train, placement, quantization = config.model, config.train, config.placement, config.model.quantization
    without_sharing = "use nccl, ipc or reload" if model.lora is None else "set weight_sync.share_base=false"

    # The reference, the advantage and its teacher.
    teacher, temperature = plan.advantage.teacher, plan.sampling.temperature
    is_base = model.lora is not None and model.ref_id in (None, model.train_id) and teacher is None
    if is_base and model.ref_device is not None:
        fix = "under LoRA the reference is the trained model without its adapters; leave it null"
        raise ConfigError("model.ref_device", model.ref_device, fix)
    plan.advantage.check(config, data.task, data.recorded)
    if "ref" in plan.advantage.needs and plan.loss.kl_coef == 0:
        fix = "train.advantage needs the reference's logprobs, which a KL penalty loads; set it above 0"
        raise ConfigError("train.kl_coef", plan.loss.kl_coef, fix)
    if teacher is not None and not is_url(teacher):
        hub.need_model(teacher, "train.advantage.teacher")
    if isinstance(plan.advantage, Distill) and data.train is not None:
        if teacher is None:
            fix = "name a model (folder or Hub id), or the URL of a vLLM server; null is for rollouts that were scored "
            raise ConfigError("train.advantage.teacher", "null", f"{fix}before")
        if is_url(teacher) and temperature != 1.0:
            fix = "a server tells its logprobs at temperature 1 alone; use 1, or load the teacher here by its id"
            raise ConfigError("generation.temperature", temperature, fix)

    # How weights get to what samples, and with which numbers it computes.
    _check_weight_sync(plan)
    if quantization is not None and engine.launcher is not None and train.precision == "fp32":
        fix = "a vLLM server with 4-bit weights computes in 16 bits; use bf16, or sample in process"
        raise ConfigError("train.precision", train.precision, fix)
    if (served := plan.server_args.get("quantization")) is not None:  # an `Engine` asks servers that run already
        if sync.requires.shares_weights:
            fix = f"weight_sync={sync.name} would train on the server's own, rounded weights; {without_sharing}"
            typed = ("engine.args", served) if quantization is None else ("model", quantization)
            raise ConfigError(f"{typed[0]}.quantization", typed[1], fix)
        if not plan.is_corrected:
            fix = f"engine.args.quantization={served} samples from other probabilities; use token_truncate"
            raise ConfigError("train.loss.importance_correction", "none", fix)

    # What was drawn from, if it is a part of the vocabulary. Filters may be those of a model's preset.
    if plan.sampling.needs_alternatives:
        off = {name: getattr(SamplingParams(1), name) for name in ("top_p", "top_k", "min_p")}
        on = {name: value for name in off if (value := config.generation.get(name, off[name])) != off[name]}
        name, value = next(iter(on.items()))
        without = "switch filters off: " + " ".join(f"generation.{each}={off[each]:g}" for each in on)
        if config.source.has_environments:
            fix = f"environments sample by themselves, and do not tell what filters left; {without}"
            raise ConfigError(f"generation.{name}", value, fix)
        if not engine.engine_class.tells_alternatives:
            kind = engine.engine_class.name
            fix = f"{kind} does not tell what filters left; use vLLM or sample in process, or {without}"
            raise ConfigError(f"generation.{name}", value, fix)
        if is_url(teacher):
            fix = f"a server tells logprobs of the whole vocabulary alone; load the teacher by its id, or {without}"
            raise ConfigError(f"generation.{name}", value, fix)

    # What can be repeated token for token.
    if config.is_batch_invariant and config.source.samples_ahead:
        fix = "which weights sample what depends on the clock; use mode=sync, or leave it at false"
        raise ConfigError("generation.batch_invariant", "true", fix)

    # Routes of a mixture of experts.
    if model.router_replay == "old" and config.planned_updates == 1:
        fix = "a single update chooses the experts that it would follow; use none, rollout with vLLM, or more updates"
        raise ConfigError("model.router_replay", "old", fix)
    if plan.sampling.needs_routes and (data.train is not None or config.source.has_environments):
        kind = engine.engine_class.name if engine.needs_server else "the sampler of this process"
        who = "environments do" if config.source.has_environments else f"{kind} does"
        fix = f"{who} not tell which experts tokens went to; use old, or generation=vllm_server on GPUs"
        if config.source.has_environments or not engine.engine_class.tells_routes:
            raise ConfigError("model.router_replay", "rollout", fix)

    # A Ray cluster.
    if placement.score_on_cluster and TaskFacts.of(data.task).scores_safely:
        fix = "this task's scores are computed in the run's process, as they cannot misbehave; leave it at false"
        raise ConfigError("placement.score_on_cluster", "true", fix)
    if placement.address is not None and engine.launcher is not None:
        if placement.engine_devices is not None:
            fix = "are this machine's, and with placement=ray the cluster gives each server its GPUs; leave it at null"
            raise ConfigError("placement.engine_devices", placement.engine_devices, fix)
        if sync.requires.placement == "same":
            fix = f"weight_sync={sync.name} needs a server on the trainer's GPU; use nccl, reload, or with LoRA "
            raise ConfigError("placement.address", placement.address, f"{fix}lora_hotswap")
        if config.source.has_environments:
            fix = "rollouts=atropos gives its environments one address, and a server may move; use placement=default"
            raise ConfigError("placement.address", placement.address, fix)

    # What train.sharding=fsdp2 can spread.
    if train.sharding == "fsdp2":
        if quantization is not None:
            fix = "train.sharding=fsdp2 cannot spread 4-bit weights; use null, or train.sharding=none"
            raise ConfigError("model.quantization", quantization, fix)
        if sync.requires.shares_weights:
            fix = f"the server shares whole weights, and train.sharding=fsdp2 spreads them; {without_sharing}"
            raise ConfigError("weight_sync", sync.name, fix)
        if type(plan.optimizer) is not AdamW or plan.optimizer.offload:
            fix = "train.sharding=fsdp2 spreads the state of torch's AdamW alone; use train/optimizer=adamw without "
            raise ConfigError("train.optimizer", train.optimizer["_target_"], f"{fix}offload")

    # What processes that share sequences need.
    if train.sequence_parallel > 1:
        if model.router_replay != "none":
            fix = "follows routes of whole sequences, and train.sequence_parallel has slices of them; use none"
            raise ConfigError("model.router_replay", model.router_replay, fix)
        if sync.requires.shares_weights:
            fix = "the first process's weights come from a server, and train.sequence_parallel is settled before that; "
            raise ConfigError("weight_sync", sync.name, f"{fix}{without_sharing}")
        if plan.layout is not None and plan.layout.pads:
            fix = "train.sequence_parallel lays sequences end to end; use auto, varlen or flash4"
            raise ConfigError("model.layout", model.layout, fix)

    # Metrics that decide what is kept, and when the run ends.
    names = metric_names(config.eval.ks, config.eval.replicates)
    tasks = sorted({problem.task for problem in data.held_out} - {""})
    names = [*names, *(f"task/{task}/{name}" for task in tasks for name in names)]
    stop_when = train.stop_when.metric if train.stop_when.is_active else None
    for key, metric in ("checkpoint.keep_best", config.checkpoint.keep_best), ("train.stop_when.metric", stop_when):
        if metric is None:
            continue
        if not config.eval.enabled:
            raise ConfigError(key, metric, "nothing is measured with eval.enabled=false")
        if metric.removeprefix("-") not in names:
            raise ConfigError(key, metric, f"no such evaluation metric; choose one of {', '.join(names)}")
        if plan.eval_weight_sync.requires.moves == "nothing":
            raise ConfigError(key, metric, "evaluations ask a server that gets no weights (weight_sync=none)")

    # What was typed and would do nothing: settings of a server that the run does not start, and of problems that its
    # source does not read (an environment of the run's reads `data`).
    if engine.launcher is None:
        where, fix = "the run starts no server", "use generation=vllm_server"
        if engine.base_urls:
            where = f"the server at generation.base_url={engine.base_url} runs already"
            fix = "set generation.base_url=null"
        uses_cluster = placement.score_on_cluster or placement.trainer == "ray"
        for setting in (override.lstrip("+~") for override in overrides):
            if setting.startswith(OF_OWN_SERVER if uses_cluster else (*OF_OWN_SERVER, *OF_CLUSTER)):
                raise ConfigError(f"{setting}: {where}, so this would do nothing; leave it out, or {fix}")
    if data.train is None and rollouts is not None and rollouts.get("environment") is None:
        read = OmegaConf.to_yaml(rollouts, resolve=False)
        for override in overrides:
            key = key_of(override)
            if key.startswith("data.") and key != "data.resample_zero_signal" and f"${{{key}}}" not in read:
                fix = "this source does not read it, so it would do nothing; leave it out (its own: conf/rollouts)"
                raise ConfigError(f"{override}: {fix}")


def _check_weight_sync(plan: Plan) -> None:
    sync, needs, engine, rank = plan.weight_sync, plan.weight_sync.requires, plan.engine, plan.lora_rank
    kind, in_flight = engine.engine_class, plan.config.rollouts.get("in_flight")

    # The kind of server, and what moves: all weights, or adapters.
    if not issubclass(kind, needs.engine):
        fix = f"is for {needs.engine.name}, and generation samples from {kind.name}; choose another of either"
        raise ConfigError("weight_sync", sync.name, fix)
    if needs.pause_mode is not None and needs.pause_mode not in kind.pause_modes:
        fix = f"{kind.name} loads weights only where no request is in flight; set weight_sync.pause_mode=abort"
        raise ConfigError("weight_sync.pause_mode", needs.pause_mode, fix)
    if rank is not None and needs.moves == "full":
        fix = "moves all weights, and with model.lora only adapters change; use weight_sync=lora_hotswap"
        raise ConfigError("weight_sync", sync.name, fix)
    if rank is None and needs.moves == "lora":
        fix = "moves LoRA adapters and the policy has none; add model/lora=default, or choose another"
        raise ConfigError("weight_sync", sync.name, fix)
    room = needs.max_lora_rank
    if engine.base_url is None and rank is not None and room is not None and rank > room:
        fix = f"the adapters have rank {rank}; set it to the next of 16, 32, 64, 128, ..."
        raise ConfigError("weight_sync.server_args.max_lora_rank", room, fix)

    # Whose server it is, what becomes of open requests, and how many may be served.
    if needs.own_server and engine.base_url is not None:
        fix = f"weight_sync={sync.name} starts servers of its own; set it to null, or use another weight_sync"
        raise ConfigError("generation.base_url", engine.base_url, fix)
    if in_flight is not None and in_flight not in needs.in_flight:
        fix = f"weight_sync={sync.name} sends no weights while requests run; use reload, or with LoRA lora_hotswap"
        if needs.in_flight:
            can = needs.in_flight[0]
            fix = f"weight_sync={sync.name} does {can} (weight_sync.pause_mode, which follows this key); use {can}"
        raise ConfigError("rollouts.in_flight", in_flight, fix)
    if needs.one_engine and max(engine.num_managed, len(engine.base_urls)) > 1:
        fix = f"serves one engine: the policy shares its memory; use one, or another weight_sync than {sync.name}"
        if engine.base_urls:
            raise ConfigError("generation.base_url", engine.base_url, fix)
        raise ConfigError("placement.num_engines", engine.num_managed, fix)


# What is said of a plan before the run begins.


def describe(plan: Plan) -> Iterator[str]:
    """The problems of a run, the batch arithmetic of an iteration, and what may be unexpected about either."""
    # The problems.
    data, config = plan.data, plan.config
    num_train = None if data.train is None else len(data.train)
    training = "no" if num_train is None else f"{num_train:,}"
    evaluated = f"{len(data.held_out):,} held-out problems" if len(data.held_out) else "no evaluations"
    yield f"data: {training} training problems, {evaluated}"
    if data.num_dropped:
        yield f"left out of training: {data.num_dropped:,} problems with prompts that are held out"
    if near := data.near_duplicates:
        closest = max(near, key=lambda each: each.share)
        yield (
            f"{len(near):,} held-out problems are almost the same as a training problem, such as {closest.held_out_id} "
            f"and {closest.train_id} ({closest.share:.0%} of its sequences of 8 words): evaluations reward memory there"
        )

    # The batch of an iteration, and its updates.
    num_problems, train, rollouts = config.data.problems_per_iteration, config.train, config.rollouts
    if num_train is not None and num_problems > num_train:
        yield f"data.problems_per_iteration={num_problems} is more: an iteration repeats problems"
    budget = f"{train.batch_size} sequences" if train.batch_size else f"{train.tokens_per_microbatch} tokens"
    if "group_size" in rollouts:
        size, updates = config.data.rollouts_per_problem, config.planned_updates
        sequences = num_problems * size
        made = f"{num_problems} problems x {size} rollouts = {sequences} sequences"
        yield f"each iteration: {made}, {train.iterations * sequences:,} in all"
        steps = f"{_counted(updates, 'update')} of about {sequences * train.epochs // updates} sequences"
    else:  # the source decides how large groups are
        count = rollouts.get("problems_per_iteration", "as its source says")
        taken = f"{count} recorded groups" if isinstance(count, int) else count
        yield f"each iteration: {taken or 'all groups of a recorded one'}"
        steps = _counted((train.updates_per_iteration or 1) * train.epochs, "update")
        if train.batch_size and train.grad_accum_steps:
            steps = f"updates of {train.batch_size * train.grad_accum_steps} sequences"
    yield f"{steps}, in microbatches of up to {budget}"


def warnings(plan: Plan) -> Iterator[str]:
    """That settings are those of the tiny model; that rollouts may be older than the policy while the clip ignores it;
    that the run ends while its learning rate still rises.
    """
    interval, train, config = plan.weight_sync.interval, plan.config.train, plan.config
    is_tiny = config.model.train_id is None and config.model.gguf_file is None
    if plan.sampling.max_new_tokens <= TINY_ANSWER and not is_tiny:
        yield (
            f"generation.max_new_tokens={plan.sampling.max_new_tokens}: too short for most models; this, train.lr and "
            "num_threads suit model=tiny by default, and usual for others are 256, 1e-6 (LoRA: 1e-5) and null"
        )
    if interval > 1 and plan.loss.ratio_reference != "rollout":
        age = _counted(interval - 1, "iteration")
        yield (
            f"weight_sync.interval={interval}: rollouts may be sampled with weights up to {age} old, and the clip does "
            "not limit that; to clip it: train.loss.ratio_reference=rollout train.loss.importance_correction=none"
        )
    num_updates = train.iterations * plan.config.planned_updates
    if train.warmup_steps >= num_updates:
        made = _counted(num_updates, "update")
        yield (
            f"train.warmup_steps={train.warmup_steps}: the run makes {made}, so the learning rate still rises at their "
            f"end, to {num_updates / train.warmup_steps * train.lr:.2g}"
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"
