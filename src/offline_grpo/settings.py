"""The plain settings of a run: one dataclass per group of `conf/`. It names and types the values and rejects invalid
ones.

Every value comes from YAML. Groups that configure a component (`task`, `generation`, `train.loss`, ...) are `Any` here:
`config/build.py` checks them against the signature of the class that `_target_` names. This module imports neither
torch nor Hydra.

Hydra merges YAML into these very classes, and launchers of sweeps pickle them. So they are plain and not frozen, of
which OmegaConf would make read-only nodes. Nothing assigns to their fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints
from urllib.parse import urlsplit

from offline_grpo.errors import ConfigError

if TYPE_CHECKING:
    from offline_grpo.interfaces import Source


def check_url(key: str, url: str | None) -> None:
    """Raise ConfigError if `url` is none that a client can ask; None is let through."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_good = is_good and not parts.query and not parts.fragment  # paths are put behind it
    except ValueError:
        is_good = False
    if not is_good:
        fix = "must begin with http:// or https:// and name a host, without ? and #, for example http://127.0.0.1:8000"
        raise ConfigError(key, url, fix)


@dataclass(frozen=True)
class Range:
    """What the values of a field must hold, also in words. null passes where the field's type has it."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: int, why: str = "") -> Range:
    return Range(f"must be at least {least}{why}" if least else f"must be 0 or more{why}", lambda value: value >= least)


def above(bound: float, words: str = "") -> Range:
    """Above `bound`, and finite."""
    return Range(f"must be above {bound:g}{words}", lambda value: bound < value < inf)


def one_of(*known: Any) -> Range:
    names = ", ".join(str(each).lower() if isinstance(each, bool) else each for each in known)
    return Range(f"must be one of {names}", lambda value: value in known)


COUNT = Range("must be at least 1, or all", lambda value: value == "all" or (type(value) is int and value > 0))
FRACTION = Range("a fraction above 0; at most 1", lambda value: 0 < value <= 1)
BAND = Range(
    "the lowest and the highest share, such as [0.1,0.9]", lambda band: len(band) == 2 and 0 <= band[0] <= band[1] <= 1
)
DEVICE = Range("use auto, cpu, cuda or cuda:N", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None)


class Group:
    """The settings of a group: checks each field against the range in its type."""

    key: ClassVar[str]

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for range_ in (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)):
                or_null = ", or null" if type(None) in get_args(hint.__origin__) else ""
                value = getattr(self, name)
                self.check(name, value is None or range_.holds(value), range_.words + or_null)

    def check(self, name: str, is_good: bool, fix: str) -> None:
        """Raise ConfigError, about the field `name`, unless it is good."""
        if not is_good:
            raise ConfigError(f"{self.key}.{name}", getattr(self, name), fix)


@dataclass
class LoraConfig(Group):
    key: ClassVar[str] = "model.lora"

    r: Annotated[int, Range("the rank must be at least 1", lambda value: value > 0)]
    alpha: Annotated[float, Range("must be above 0; with 0 the adapter does nothing", lambda value: value > 0)]
    dropout: Annotated[float, Range("a probability in [0, 1)", lambda value: 0 <= value < 1)]
    target_modules: Annotated[list[str], Range("name at least one, or [all-linear]", bool)]
    layer_indices: str | None
    use_rslora: bool = False


@dataclass
class ModelConfig(Group):
    key: ClassVar[str] = "model"

    train_id: str | None
    ref_id: str | None
    device: Annotated[str, DEVICE]
    attn_implementation: str
    layout: Any
    head: Any
    compile: Annotated[Any, one_of("auto", True, False)]  # OmegaConf 2.3 cannot nest a union of str and bool
    tiny: Any
    trust_remote_code: bool
    lora: LoraConfig | None = None
    ref_device: str | None = None
    chat_template: str | None = None
    # OmegaConf would want + for new keys of a dict that is typed
    chat_template_kwargs: Annotated[Any, Range("{NAME: VALUE}, or null", lambda value: isinstance(value, dict))] = None
    gguf_file: str | None = None
    quantization: Annotated[str | None, one_of("nf4")] = None
    router_replay: Annotated[str, one_of("none", "old", "rollout")] = "none"
    mlp_tile_tokens: Annotated[int | None, at_least(1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        has_model = self.train_id is not None or self.gguf_file is not None or self.tiny is not None
        self.check("train_id", has_model, "name a Hugging Face id or a local folder")
        fix = "quantised weights cannot be trained, and adapters beside them can; add model/lora=default, or use null"
        self.check("quantization", self.quantization is None or self.lora is not None, fix)


@dataclass
class DataConfig(Group):
    key: ClassVar[str] = "data"

    problems_per_iteration: Annotated[int, at_least(1)]
    rollouts_per_problem: Annotated[int, at_least(2, ": GRPO compares rollouts; a group of one has no signal")]
    train_seed_start: Annotated[int, at_least(0)]
    num_train_seeds: Annotated[int | None, at_least(1)]
    max_prompt_tokens: Annotated[int | None, at_least(1)]
    shuffle: bool
    pass_rate: Annotated[list[float] | None, BAND]
    pass_rate_from: str | None
    pass_rate_decay: Annotated[float, FRACTION]  # 1 forgets nothing
    resample_zero_signal: bool
    max_resamples: int
    soft_overlong_tokens: int | None
    penalize_length_if_solved: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "acts with data.pass_rate alone; set that too, such as [0.1,0.9]"
        self.check("pass_rate_from", self.pass_rate_from is None or self.pass_rate is not None, fix)


@dataclass
class StopWhenConfig(Group):
    key: ClassVar[str] = "train.stop_when"

    metric: str
    threshold: float | None
    patience: Annotated[int | None, at_least(1)]

    @property
    def is_active(self) -> bool:
        """Whether a run may end before `train.iterations`."""
        return self.threshold is not None or self.patience is not None


@dataclass
class TrainConfig(Group):
    key: ClassVar[str] = "train"

    iterations: Annotated[int, at_least(1)]
    stop_when: StopWhenConfig
    updates_per_iteration: Annotated[int | None, at_least(1)]
    epochs: Annotated[int, at_least(1)]
    batch_size: Annotated[int | None, at_least(1)]
    tokens_per_microbatch: Annotated[int | None, at_least(1)]
    grad_accum_steps: Annotated[int | None, at_least(1)]
    lr: Annotated[float, above(0, " and finite")]
    weight_decay: Annotated[float, at_least(0)]
    warmup_steps: Annotated[int, at_least(0)]
    schedule: Annotated[str, one_of("constant", "linear", "cosine")]
    grad_clip: Annotated[float, Range("must be above 0; use inf to switch clipping off", lambda value: value > 0)]
    kl_coef: Annotated[float, at_least(0)]
    entropy_coef: float
    precision: Annotated[str, one_of("fp32", "bf16", "fp16")]
    dither_masters: bool
    sharding: Annotated[str, one_of("none", "fsdp2")]
    sequence_parallel: Annotated[int, at_least(1)]
    gradient_checkpointing: Annotated[Any, one_of("auto", True, False)]  # as model.compile
    activation_offload: Annotated[Any, one_of("auto", True, False)]
    train_layer_indices: str | None
    mask_truncated: bool
    top_entropy_frac: Annotated[float, FRACTION]  # 1 trains on all tokens
    drop_zero_signal_groups: bool
    max_bad_updates: Annotated[int, at_least(1)]
    profile: int | None
    advantage: Any
    loss: Any
    optimizer: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        is_iteration = self.profile is None or 0 < self.profile <= self.iterations
        fix = f"an iteration, from 1 to train.iterations={self.iterations}, or null"
        self.check("profile", is_iteration, fix)
        fix = "its loss scaling is not spread (train.sharding=fsdp2); use bf16 or fp32"
        self.check("precision", self.precision != "fp16" or self.sharding != "fsdp2", fix)

        fix = "moves the inputs of recomputed blocks; use auto, or train.gradient_checkpointing=true"
        is_acting = self.activation_offload is not True or self.gradient_checkpointing is True
        self.check("activation_offload", is_acting, fix)

        # Of the two ways to say how large a microbatch is, and how many there are in an update, exactly one.
        is_one = (self.batch_size is None) != (self.tokens_per_microbatch is None)
        other = f"train.tokens_per_microbatch (={self.tokens_per_microbatch})"
        fix = f"set exactly one of train.batch_size (sequences per microbatch) and {other}; null switches one off"
        self.check("batch_size", is_one, fix)
        is_one = (self.updates_per_iteration is None) != (self.grad_accum_steps is None)
        other = f"train.updates_per_iteration (={self.updates_per_iteration})"
        fix = f"set exactly one of train.grad_accum_steps and {other}: each sets the number of sequences per update"
        self.check("grad_accum_steps", is_one, fix)
        is_counted = self.grad_accum_steps is None or self.batch_size is not None
        fix = "counts microbatches of train.batch_size sequences; use train.updates_per_iteration with a token budget"
        self.check("grad_accum_steps", is_counted, fix)


@dataclass
class EvalConfig(Group):
    key: ClassVar[str] = "eval"

    enabled: bool
    eval_first: bool
    backend: Any
    base_url: str | None
    weight_sync: Annotated[str | None, one_of("none")]  # null pushes the policy, none sends no weights
    batch_size: Annotated[int, at_least(1)]
    timeout_s: Annotated[float, above(0)]
    max_retries: Annotated[int, at_least(0)]
    tolerance_nats: Annotated[float, above(0)]
    location: Annotated[str, one_of("memory", "disk")]
    interval: Annotated[int, at_least(1)]
    num_ids: Annotated[Any, COUNT]  # or null, for at most 256: OmegaConf 2.3 cannot merge a union of several types
    id_seed_start: int
    ids: list[int]
    replicates: Annotated[int, at_least(1)]
    ks: Annotated[list[int], Range("name at least one k, and none below 1", lambda value: min(value, default=0) > 0)]
    seed_base: int
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: Annotated[int, at_least(1)]
    stop: list[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url("eval.base_url", self.base_url)
        fix = f"pass@k needs at least k replicates and eval.replicates={self.replicates}; raise it or lower k"
        self.check("ks", max(self.ks) <= self.replicates, fix)


@dataclass
class CheckpointConfig(Group):
    key: ClassVar[str] = "checkpoint"

    enabled: bool
    save_interval: Annotated[int, Range("every N iterations, or 0 for the last one only", lambda value: value >= 0)]
    keep_last_k: Annotated[Any, COUNT]
    keep_best: str | None
    format: Annotated[str, one_of("full", "sharded")]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("keep_best", self.enabled or self.keep_best is None, "checkpoint.enabled=false saves none")

    @property
    def num_kept(self) -> int | None:
        """`keep_last_k` as a number; None for all."""
        return self.keep_last_k if isinstance(self.keep_last_k, int) else None


@dataclass
class PlacementConfig(Group):
    key: ClassVar[str] = "placement"

    num_engines: Annotated[int, at_least(1)]
    engine_devices: Annotated[list[int] | None, Range("a list of GPUs such as [1]", bool)]
    check_memory: bool
    address: str | None
    ray_init: dict[str, Any]
    score_on_cluster: bool
    trainer: Annotated[str, one_of("here", "ray")] = "here"
    num_trainers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        uses_ray = self.address is not None
        self.check("trainer", self.trainer == "here" or uses_ray, "add placement=ray")
        for name in ("ray_init", "score_on_cluster"):
            self.check(name, uses_ray or not getattr(self, name), "acts with placement=ray alone; leave it out")
        fix = "at least 1, and more with placement.trainer=ray alone; on this machine, accelerate launch starts several"
        is_number = self.num_trainers == 1 or (self.num_trainers > 1 and self.trainer == "ray")
        self.check("num_trainers", is_number, fix)


@dataclass
class ScoringConfig(Group):
    key: ClassVar[str] = "scoring"

    workers: Annotated[int, Range("must be 0 (score in the run's process) or more", lambda value: value >= 0)]
    episodes: Annotated[int, at_least(1)]
    timeout_s: Annotated[float, above(0, " and finite")]
    memory_mib: Annotated[int, Range("must be at least 128: Python and a task need that", lambda value: value >= 128)]
    on_failure: Annotated[str, one_of("exclude", "zero", "least")]
    stop_at_failed_frac: Annotated[float | None, FRACTION]
    sandbox: Annotated[str, one_of("bubblewrap", "none")]


@dataclass
class RunConfig:
    seed: int
    num_threads: int | None
    resume: str | None
    cache_dir: str | None
    model: ModelConfig
    task: Any
    scoring: ScoringConfig
    data: DataConfig
    rollouts: Any
    generation: Any
    train: TrainConfig
    weight_sync: Any
    placement: PlacementConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    logger: Any = None
    engine: Any = None
    samples: Any = None

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError("num_threads", self.num_threads, "at least 1, or null for one per core")
        if self.checkpoint.format != "full" and self.train.sharding != "fsdp2":
            fix = "nothing is spread over processes; use full, or train.sharding=fsdp2"
            raise ConfigError("checkpoint.format", self.checkpoint.format, fix)
        if self.placement.score_on_cluster and self.scoring.workers == 0:
            fix = "placement.score_on_cluster=true needs processes that score; set 1 or more, for each machine"
            raise ConfigError("scoring.workers", self.scoring.workers, fix)

    @property
    def source(self) -> type[Source]:
        """The class of the group `rollouts`, which says what that source can."""
        return resolve_name(self.rollouts["_target_"])

    @property
    def is_batch_invariant(self) -> bool:
        """`generation.batch_invariant`, which not every engine has."""
        return self.generation.get("batch_invariant", False)

    @property
    def planned_updates(self) -> int:
        return planned_updates(self.train, self.data)


def planned_updates(train: Any, data: Any) -> int:
    """Updates of an iteration in which no group is dropped, and the most there can be; what the learning-rate schedule
    counts with.
    """
    sequences = data.problems_per_iteration * data.rollouts_per_problem
    if train.grad_accum_steps is None:
        return min(train.updates_per_iteration, sequences) * train.epochs
    return -(-sequences // (train.batch_size * train.grad_accum_steps)) * train.epochs


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration's values by their dotted keys. A group without keys is a value too."""
    if not isinstance(node, Mapping) or not node:
        return {prefix: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in flat(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }
