"""The plain settings of a run: one dataclass per group of `conf/`. It names and types the values and rejects invalid
ones.

Every value comes from YAML. Groups that configure a component (`task`, `generation`, `train.loss`, ...) are `Any` here:
`run/build.py` checks them against the signature of the class that `_target_` names. This module imports neither torch
nor Hydra.

Hydra merges YAML into these very classes, and launchers of sweeps pickle them. So they are plain and not frozen, of
which OmegaConf would make read-only nodes. Nothing assigns to their fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any
from urllib.parse import urlsplit

from offline_grpo.errors import require


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
    fix = "must begin with http:// or https:// and name a host, without ? and #, for example http://127.0.0.1:8000"
    require(is_good, key, url, fix)


def check(settings: object, key: str, is_good: bool, fix: str) -> None:
    """`require` for a setting of this group; the last part of `key` is the attribute's name."""
    require(is_good, key, getattr(settings, key.rpartition(".")[2]), fix)


@dataclass
class LoraConfig:
    r: int
    alpha: float
    dropout: float
    target_modules: list[str]
    layer_indices: str | None
    use_rslora: bool = False

    def __post_init__(self) -> None:
        check(self, "model.lora.r", self.r > 0, "the rank must be at least 1")
        check(self, "model.lora.alpha", self.alpha > 0, "must be above 0; with 0 the adapter does nothing")
        check(self, "model.lora.dropout", 0 <= self.dropout < 1, "a probability in [0, 1)")
        check(self, "model.lora.target_modules", bool(self.target_modules), "name at least one, or [all-linear]")


@dataclass
class ModelConfig:
    train_id: str | None
    ref_id: str | None
    device: str
    attn_implementation: str
    layout: Any
    head: Any
    compile: Any  # bool or "auto": OmegaConf 2.3 cannot nest a union of the two
    tiny: Any
    trust_remote_code: bool
    lora: LoraConfig | None = None
    ref_device: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Any = None  # a dict: one that is typed would have to be extended with +
    gguf_file: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        has_model = self.train_id is not None or self.gguf_file is not None or self.tiny is not None
        check(self, "model.train_id", has_model, "name a Hugging Face id or a local folder")
        is_good = self.chat_template_kwargs is None or isinstance(self.chat_template_kwargs, dict)
        check(self, "model.chat_template_kwargs", is_good, "must be {NAME: VALUE, ...}, or null")
        check(self, "model.quantization", self.quantization in (None, "nf4"), "must be nf4 or null")
        fix = "quantised weights cannot be trained, and adapters beside them can; add model/lora=default, or use null"
        check(self, "model.quantization", self.quantization is None or self.lora is not None, fix)
        check(self, "model.compile", self.compile in ("auto", True, False), "must be one of auto, true, false")


@dataclass
class DataConfig:
    problems_per_iteration: int
    rollouts_per_problem: int
    train_seed_start: int
    num_train_seeds: int | None
    max_prompt_tokens: int | None
    shuffle: bool
    pass_rate: list[float] | None
    pass_rate_from: str | None
    pass_rate_decay: float
    resample_zero_signal: bool
    max_resamples: int
    soft_overlong_tokens: int | None
    penalize_length_if_solved: bool

    def __post_init__(self) -> None:
        check(self, "data.problems_per_iteration", self.problems_per_iteration > 0, "must be at least 1")
        fix = "GRPO compares the rollouts of a problem with each other; a group of one has no signal, use 2 or more"
        check(self, "data.rollouts_per_problem", self.rollouts_per_problem > 1, fix)
        check(self, "data.train_seed_start", self.train_seed_start >= 0, "must be 0 or more")
        band = self.pass_rate
        is_band = band is None or (len(band) == 2 and 0 <= band[0] <= band[1] <= 1)
        check(self, "data.pass_rate", is_band, "the lowest and the highest share, such as [0.1,0.9], or null")
        fix = "acts with data.pass_rate alone; set that too, such as [0.1,0.9]"
        check(self, "data.pass_rate_from", self.pass_rate_from is None or band is not None, fix)
        check(
            self, "data.pass_rate_decay", 0 < self.pass_rate_decay <= 1, "above 0, and at most 1, which forgets nothing"
        )
        for name in ("num_train_seeds", "max_prompt_tokens"):
            value = getattr(self, name)
            check(self, f"data.{name}", value is None or value > 0, "null or at least 1")


@dataclass
class StopWhenConfig:
    metric: str
    threshold: float | None
    patience: int | None

    def __post_init__(self) -> None:
        is_count = self.patience is None or self.patience > 0
        check(self, "train.stop_when.patience", is_count, "null, or at least 1")

    @property
    def is_active(self) -> bool:
        """Whether a run may end before `train.iterations`."""
        return self.threshold is not None or self.patience is not None


@dataclass
class TrainConfig:
    iterations: int
    stop_when: StopWhenConfig
    updates_per_iteration: int | None
    epochs: int
    batch_size: int | None
    tokens_per_microbatch: int | None
    grad_accum_steps: int | None
    lr: float
    weight_decay: float
    warmup_steps: int
    schedule: str
    grad_clip: float
    kl_coef: float
    entropy_coef: float
    precision: str
    dither_masters: bool
    sharding: str
    gradient_checkpointing: Any  # bool or "auto", as model.compile
    train_layer_indices: str | None
    mask_truncated: bool
    top_entropy_frac: float
    drop_zero_signal_groups: bool
    max_bad_updates: int
    profile: int | None
    advantage: Any
    loss: Any
    optimizer: Any

    def __post_init__(self) -> None:
        for name in ("iterations", "epochs", "max_bad_updates"):
            check(self, f"train.{name}", getattr(self, name) > 0, "must be at least 1")
        for name in ("weight_decay", "warmup_steps", "kl_coef"):
            check(self, f"train.{name}", getattr(self, name) >= 0, "must be 0 or more")
        check(self, "train.lr", 0 < self.lr < inf, "must be above 0 and finite")
        is_iteration = self.profile is None or 0 < self.profile <= self.iterations
        fix = f"an iteration, from 1 to train.iterations={self.iterations}, or null"
        check(self, "train.profile", is_iteration, fix)
        is_share = 0 < self.top_entropy_frac <= 1
        check(self, "train.top_entropy_frac", is_share, "a share of the tokens, above 0; 1 trains on all")
        check(self, "train.grad_clip", self.grad_clip > 0, "must be above 0; use inf to switch clipping off")
        for name, known in (
            ("schedule", ("constant", "linear", "cosine")),
            ("precision", ("fp32", "bf16", "fp16")),
            ("sharding", ("none", "fsdp2")),
        ):
            check(self, f"train.{name}", getattr(self, name) in known, f"must be one of {', '.join(known)}")
        is_known = self.gradient_checkpointing in ("auto", True, False)
        check(self, "train.gradient_checkpointing", is_known, "must be one of auto, true, false")
        fix = "its loss scaling is not spread (train.sharding=fsdp2); use bf16 or fp32"
        check(self, "train.precision", self.precision != "fp16" or self.sharding != "fsdp2", fix)
        self._check_batch_arithmetic()

    def _check_batch_arithmetic(self) -> None:
        is_one = (self.batch_size is None) != (self.tokens_per_microbatch is None)
        other = f"train.tokens_per_microbatch (={self.tokens_per_microbatch})"
        fix = f"set exactly one of train.batch_size (sequences per microbatch) and {other}; null switches one off"
        check(self, "train.batch_size", is_one, fix)
        is_one = (self.updates_per_iteration is None) != (self.grad_accum_steps is None)
        other = f"train.updates_per_iteration (={self.updates_per_iteration})"
        fix = f"set exactly one of train.grad_accum_steps and {other}: each sets the number of sequences per update"
        check(self, "train.grad_accum_steps", is_one, fix)
        is_counted = self.grad_accum_steps is None or self.batch_size is not None
        fix = "counts microbatches of train.batch_size sequences; use train.updates_per_iteration with a token budget"
        check(self, "train.grad_accum_steps", is_counted, fix)
        for name in ("batch_size", "tokens_per_microbatch", "grad_accum_steps", "updates_per_iteration"):
            value = getattr(self, name)
            check(self, f"train.{name}", value is None or value > 0, "must be at least 1, or null")


@dataclass
class EvalConfig:
    enabled: bool
    eval_first: bool
    backend: Any
    base_url: str | None
    weight_sync: str | None
    batch_size: int
    timeout_s: float
    max_retries: int
    tolerance_nats: float
    location: str
    interval: int
    num_ids: Any  # int, "all" or None: OmegaConf 2.3 cannot merge a union of several types
    id_seed_start: int
    ids: list[int]
    replicates: int
    ks: list[int]
    seed_base: int
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    stop: list[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool

    def __post_init__(self) -> None:
        for name in ("interval", "batch_size", "replicates", "max_new_tokens"):
            check(self, f"eval.{name}", getattr(self, name) > 0, "must be at least 1")
        is_number = type(self.num_ids) is int and self.num_ids > 0
        fix = "must be at least 1, all, or null for at most 256"
        check(self, "eval.num_ids", is_number or self.num_ids in (None, "all"), fix)
        check_url("eval.base_url", self.base_url)
        check(self, "eval.timeout_s", self.timeout_s > 0, "must be above 0")
        check(self, "eval.max_retries", self.max_retries >= 0, "must be 0 or more")
        check(self, "eval.tolerance_nats", self.tolerance_nats > 0, "must be above 0")
        fix = "must be null (push the policy) or none (send no weights)"
        check(self, "eval.weight_sync", self.weight_sync in (None, "none"), fix)
        check(self, "eval.location", self.location in ("memory", "disk"), "must be one of memory, disk")
        check(self, "eval.ks", min(self.ks, default=0) > 0, "name at least one k, and none below 1")
        fix = f"pass@k needs at least k replicates and eval.replicates={self.replicates}; raise it or lower k"
        check(self, "eval.ks", max(self.ks) <= self.replicates, fix)


@dataclass
class CheckpointConfig:
    enabled: bool
    save_interval: int
    keep_last_k: Any  # a number, or "all": OmegaConf 2.3 cannot nest a union of the two
    keep_best: str | None
    format: str

    def __post_init__(self) -> None:
        check(self, "checkpoint.format", self.format in ("full", "sharded"), "must be one of full, sharded")
        fix = "every N iterations, or 0 for the last one only"
        check(self, "checkpoint.save_interval", self.save_interval >= 0, fix)
        is_good = self.keep_last_k == "all" or (self.num_kept or 0) > 0
        check(self, "checkpoint.keep_last_k", is_good, "must be at least 1, or all")
        is_good = self.enabled or self.keep_best is None
        check(self, "checkpoint.keep_best", is_good, "checkpoint.enabled=false saves none")

    @property
    def num_kept(self) -> int | None:
        """`keep_last_k` as a number; None for all."""
        return self.keep_last_k if isinstance(self.keep_last_k, int) else None


@dataclass
class PlacementConfig:
    num_engines: int
    engine_devices: list[int] | None
    check_memory: bool
    address: str | None
    ray_init: dict[str, Any]
    score_on_cluster: bool
    trainer: str = "here"
    num_trainers: int = 1

    def __post_init__(self) -> None:
        check(self, "placement.num_engines", self.num_engines > 0, "must be at least 1")
        check(self, "placement.engine_devices", self.engine_devices != [], "null, or a list of GPUs such as [1]")
        check(self, "placement.trainer", self.trainer in ("here", "ray"), "must be one of here, ray")
        uses_ray = self.address is not None
        check(self, "placement.trainer", self.trainer == "here" or uses_ray, "add placement=ray")
        for name in ("ray_init", "score_on_cluster"):
            is_good = uses_ray or not getattr(self, name)
            check(self, f"placement.{name}", is_good, "acts with placement=ray alone; leave it out")
        fix = "at least 1, and more with placement.trainer=ray alone; on this machine, accelerate launch starts several"
        is_number = self.num_trainers == 1 or (self.num_trainers > 1 and self.trainer == "ray")
        check(self, "placement.num_trainers", is_number, fix)


@dataclass
class ScoringConfig:
    workers: int
    episodes: int
    timeout_s: float
    memory_mib: int
    on_failure: str
    stop_at_failed_frac: float | None

    def __post_init__(self) -> None:
        check(self, "scoring.workers", self.workers >= 0, "must be 0 (score in the run's process) or more")
        check(self, "scoring.episodes", self.episodes > 0, "must be at least 1")
        check(self, "scoring.timeout_s", 0 < self.timeout_s < inf, "must be above 0 and finite")
        fix = "must be at least 128: Python and a task need that"
        check(self, "scoring.memory_mib", self.memory_mib >= 128, fix)
        is_good = self.on_failure in ("exclude", "zero", "least")
        check(self, "scoring.on_failure", is_good, "must be one of exclude, zero, least")
        is_good = self.stop_at_failed_frac is None or 0 < self.stop_at_failed_frac <= 1
        check(self, "scoring.stop_at_failed_frac", is_good, "a fraction above 0, up to 1, or null")


@dataclass
class RunConfig:
    seed: int
    num_threads: int | None
    resume: str | None
    cache_dir: str
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
        is_good = self.num_threads is None or self.num_threads > 0
        require(is_good, "num_threads", self.num_threads, "at least 1, or null for one per core")
        is_good = self.checkpoint.format == "full" or self.train.sharding == "fsdp2"
        fix = "nothing is spread over processes; use full, or train.sharding=fsdp2"
        require(is_good, "checkpoint.format", self.checkpoint.format, fix)
        is_good = not self.placement.score_on_cluster or self.scoring.workers > 0
        fix = "placement.score_on_cluster=true needs processes that score; set 1 or more, for each machine"
        require(is_good, "scoring.workers", self.scoring.workers, fix)

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
