"""What every GPU of a run will hold at its fullest, predicted part by part before any weights are loaded, and whether it fits.

    a training process   weights + masters + gradients + optimizer state + reference + activations of the largest microbatch
    a server             its share of the GPU (engine.args.gpu_memory_utilization): weights, and what remains for the KV cache

Nothing here needs a GPU. The prediction is for the worst case: every completion as long as it may get.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, prod
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from offline_grpo.errors import ConfigError
from offline_grpo.model.footprint import Footprint, Microbatch, allocated_bytes, build_on_meta, measure, weights_bytes
from offline_grpo.model.forward import choose_packing
from offline_grpo.model.load import DTYPES
from offline_grpo.train.optimizer import Adafactor, AdamW8bit
from offline_grpo.types import SamplingParams

if TYPE_CHECKING:
    from offline_grpo.run.preflight import Plan

GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 4  # CUDA context, kernels and cuBLAS workspaces of a process: 0.74 GiB on an H100
SHARE_KEYS = ("gpu_memory_utilization", "mem_fraction_static")  # of vLLM and SGLang
DEFAULT_SHARE = 0.92  # vLLM's own
SERVER_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
KV_CACHE_FLOOR = 1.1  # a server's share is at least this many times its weights
LOGITS_COPIES = 4  # float32 [rows, vocabulary] that sampling in process holds at once


@dataclass(frozen=True)
class Part:
    """Memory on a GPU, the setting (KEY=VALUE) that it follows from, and what to do if it is too much."""

    name: str
    num_bytes: int
    setting: str
    fix: str


@dataclass(frozen=True)
class DevicePlan:
    """A GPU's parts: those of its training processes, and those of the server (see `_server_parts`), empty where it has none here."""

    gpu: int
    total_bytes: int
    trainer: tuple[Part, ...]
    server: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.trainer + self.server

    @property
    def needed_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """The GPUs of a run, in order."""

    devices: tuple[DevicePlan, ...]


def predict(
    plan: Plan,
    model_config: PretrainedConfig,
    reference_config: PretrainedConfig | None,
    *,
    longest_prompt: int,
    trainers: Sequence[int],
    server_gpus: Sequence[int],
    total_bytes: Sequence[int],
) -> MemoryPlan:
    """What every GPU that the run uses will hold.

    Args:
        model_config: of the model to train.
        reference_config: of a reference that is loaded beside it, None if there is none (see `needs_reference_copy`).
        longest_prompt: in tokens.
        trainers: the GPU of every training process, that of the first one first: the one whose weights can be the server's.
        server_gpus: of the server; unused where the run starts none.
        total_bytes: memory of each GPU of this machine.
    """
    train = plan.config.train
    dtype = DTYPES[train.precision]
    model = build_on_meta(
        model_config,
        plan.config.model,
        precision=train.precision,
        train_layer_indices=train.train_layer_indices,
        gradient_checkpointing=train.gradient_checkpointing,
    )
    sequence_tokens = _sequence_tokens(longest_prompt, plan.sampling, model_config)
    eval_tokens = _sequence_tokens(longest_prompt, plan.eval_sampling, model_config)
    footprint = measure(
        model,
        largest_microbatch(plan, sequence_tokens, num_processes=len(trainers)),
        packing=choose_packing(plan.config.model.packing, torch.device("cuda"), dtype),
        separate_masters=plan.weight_sync.requires.shares_weights,
        entropy_requires_grad=plan.loss.entropy_coef != 0,
    )
    others = [
        *_static_parts(plan, footprint, weights_bytes(reference_config, dtype) if reference_config is not None else 0),
        _activations_part(plan, footprint, num_processes=len(trainers)),
        _sampling_part(plan, model_config, max(sequence_tokens, eval_tokens), footprint),
        Part("CUDA context", CONTEXT_BYTES, "model.device=cuda", "train on another GPU"),
    ]
    weights = Part("policy weights", footprint.weights_bytes, f"model.train_id={plan.config.model.train_id}", _smaller_model(plan))
    devices = []
    for gpu in sorted({*trainers, *(server_gpus if plan.engine.launcher is not None else ())}):
        processes = [process for process, trained_on in enumerate(trainers) if trained_on == gpu]
        owners = [process for process in processes if process > 0 or not plan.weight_sync.requires.shares_weights]
        here = tuple(part for part in [weights] * len(owners) + others * len(processes) if part.num_bytes > 0)
        is_served = plan.engine.launcher is not None and gpu in server_gpus
        server = _server_parts(plan, model_config, total_bytes[gpu]) if is_served else ()
        devices.append(DevicePlan(gpu, total_bytes[gpu], here, server))
    return MemoryPlan(tuple(devices))


def describe(plan: MemoryPlan) -> list[str]:
    """A small table: one line per part, in GiB."""
    lines = []
    for device in plan.devices:
        lines.append(f"GPU {device.gpu}: predicted to hold {_gib(device.needed_bytes)} of {_gib(device.total_bytes)} at its fullest")
        lines += [f"  {part.num_bytes / GIB:8.2f} GiB  {part.name}" for part in device.parts]
    return lines


def check(plan: MemoryPlan) -> None:
    """Refuse what cannot fit.

    Raises:
        ConfigError: names the setting whose change helps most; `placement.check_memory=false` goes without this check.
    """
    for device in plan.devices:
        if device.server:
            _check_server(device)
        if device.needed_bytes > device.total_bytes:
            raise ConfigError(_refusal(device))


def _check_server(device: DevicePlan) -> None:
    weights, rest = device.server[0], device.server[1]
    share = weights.num_bytes + rest.num_bytes
    if share < weights.num_bytes * KV_CACHE_FLOOR:
        least = ceil(weights.num_bytes * KV_CACHE_FLOOR / device.total_bytes * 100) / 100
        fix = f"use {least:.2f} or more" if least <= 1 else "it needs several GPUs (placement.engine_devices), or a smaller model"
        raise ConfigError(
            f"{rest.setting}: that share of GPU {device.gpu}, {_gib(share)}, holds the server's weights of {_gib(weights.num_bytes)} and "
            f"hardly any KV cache; {fix}"
        )


def _refusal(device: DevicePlan) -> str:
    trainer_bytes = sum(part.num_bytes for part in device.trainer)
    largest = max(device.trainer or device.server, key=lambda part: part.num_bytes)
    setting, fix = largest.setting, largest.fix
    if device.server:
        weights, rest, context = device.server
        room = floor((device.total_bytes - trainer_bytes - context.num_bytes) / device.total_bytes * 100) / 100
        if room * device.total_bytes >= weights.num_bytes * KV_CACHE_FLOOR:
            setting, fix = rest.setting, f"use {rest.setting.partition('=')[0]}={room:.2f} or less"
    parts = ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in sorted(device.parts, key=lambda part: -part.num_bytes)[:4])
    return (
        f"{setting}: GPU {device.gpu} has {_gib(device.total_bytes)} and would have to hold {_gib(device.needed_bytes)} ({parts}, ...); "
        f"{fix}; placement.check_memory=false starts all the same"
    )


def needs_reference_copy(plan: Plan) -> bool:
    """Whether a KL term compares with a model of its own: without LoRA, or with another `model.ref_id` (see `load_reference`)."""
    model = plan.config.model
    return plan.loss.kl_coef > 0 and (model.lora is None or model.ref_id not in (None, model.train_id))


def largest_microbatch(plan: Plan, sequence_tokens: int, *, num_processes: int) -> Microbatch:
    """A process's largest microbatch if every sequence has `sequence_tokens` tokens.

    Example: 100 sequences of 600 tokens per update and tokens_per_microbatch=2000 are microbatches of 4 rows of 500 tokens.
    """
    train, data = plan.config.train, plan.config.data
    num_sequences = data.problems_per_iteration * data.rollouts_per_problem
    if train.grad_accum_steps is not None:
        num_sequences = min(num_sequences, (train.batch_size or 1) * train.grad_accum_steps)
    elif train.updates_per_iteration is not None:
        num_sequences = ceil(num_sequences / train.updates_per_iteration)
    of_process = ceil(num_sequences / num_processes)
    rows, row_tokens = min(of_process, train.batch_size or of_process), sequence_tokens
    if train.tokens_per_microbatch is not None and rows * sequence_tokens > train.tokens_per_microbatch:
        rows = ceil(train.tokens_per_microbatch / sequence_tokens)
        row_tokens = max(train.tokens_per_microbatch, sequence_tokens) // rows  # so that rows of any length add up to the limit
    scored = max(1, min(plan.sampling.max_new_tokens, row_tokens - 1))
    return Microbatch(rows, row_tokens, scored, is_whole_update=rows * row_tokens >= of_process * sequence_tokens)


def optimizer_state_bytes(optimizer: Any, shapes: Iterable[Sequence[int]]) -> int:
    """State of the optimizer that the factory `optimizer` makes for fp32 weights of these shapes; unknown ones count as AdamW."""
    if isinstance(optimizer, Adafactor):  # a row and a column of squared gradients per matrix
        sizes = [[prod(s[:-1]) * 4, prod([*s[:-2], s[-1]]) * 4] if len(s) > 1 else [prod(s) * 4] for s in shapes]
    elif isinstance(optimizer, AdamW8bit):  # two bytes per weight and a scale per block of 256; small tensors in fp32
        sizes = [[n, n, ceil(n / 256) * 4, ceil(n / 256) * 4] if n >= 4096 else [n * 4, n * 4] for n in map(prod, shapes)]
    else:  # two running means, and the number of steps
        sizes = [[n * 4, n * 4, 4] for n in map(prod, shapes)]
    return sum(allocated_bytes(size) for tensors in sizes for size in tensors)


def _static_parts(plan: Plan, footprint: Footprint, reference_bytes: int) -> list[Part]:
    """What stays from one microbatch to the next, besides the weights."""
    train = plan.config.train
    model, smaller = f"model.train_id={plan.config.model.train_id}", _smaller_model(plan)
    optimizer = f"train.optimizer._target_={train.optimizer['_target_']}"
    state_bytes = optimizer_state_bytes(plan.optimizer, footprint.trained_shapes)
    less_state = (
        "use model/lora=default" if isinstance(plan.optimizer, AdamW8bit) else "use train/optimizer=adamw_8bit or model/lora=default"
    )
    return [
        Part("fp32 masters", footprint.masters_bytes, model, smaller),
        Part("gradients", footprint.gradients_bytes, model, smaller),
        Part("optimizer state", state_bytes, optimizer, less_state),
        Part("reference weights", reference_bytes, f"train.kl_coef={train.kl_coef:g}", "train.kl_coef=0 loads no reference"),
    ]


def _smaller_model(plan: Plan) -> str:
    return "choose a smaller model" if plan.config.model.lora is not None else "use model/lora=default or a smaller model"


def _activations_part(plan: Plan, footprint: Footprint, *, num_processes: int) -> Part:
    """Of a microbatch, or, if that is more, what the optimizer's step and the sum over processes hold for a moment."""
    train = plan.config.train
    largest = max((prod(shape) for shape in footprint.trained_shapes), default=0)
    scratch_bytes = 2 * 4 * largest if isinstance(plan.optimizer, Adafactor) else 0
    if num_processes > 1:
        scratch_bytes = max(scratch_bytes, 2 * footprint.gradients_bytes)  # all gradients as one message, and its copy
    key = "tokens_per_microbatch" if train.tokens_per_microbatch is not None else "batch_size"
    fix = "lower it, which changes no gradient" + ("" if train.gradient_checkpointing else ", or set train.gradient_checkpointing=true")
    return Part("activations", max(footprint.activations_bytes, scratch_bytes), f"train.{key}={getattr(train, key)}", fix)


def _sampling_part(plan: Plan, model_config: PretrainedConfig, sequence_tokens: int, footprint: Footprint) -> Part:
    """What sampling in process needs beyond what training has given back by then: gradients and activations."""
    config: Any = model_config.get_text_config()
    rows = 0 if plan.engine.needs_server else plan.engine.client_node.get("batch_size", 1)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_bytes = 2 * rows * sequence_tokens * num_kv_heads * head_dim * DTYPES[plan.config.train.precision].itemsize
    logits_bytes = LOGITS_COPIES * 4 * rows * config.vocab_size
    needed = layer_bytes * (config.num_hidden_layers + 1) + logits_bytes  # a layer's cache is copied when it grows
    beyond = max(0, needed - footprint.gradients_bytes - footprint.activations_bytes)
    name = "KV cache of sampling, beyond gradients and activations"
    return Part(name, beyond, f"generation.batch_size={plan.engine.client_node.get('batch_size')}", "lower it, which changes no sample")


def _server_parts(plan: Plan, model_config: PretrainedConfig, total_bytes: int) -> tuple[Part, Part, Part]:
    """Weights, what its share leaves for KV cache and the rest (below 0 if too little), and its CUDA context, which the share excludes."""
    args = plan.server_args
    key = next((key for key in SHARE_KEYS if key in args), SHARE_KEYS[0])
    share = args.get(key) or DEFAULT_SHARE
    dtype = SERVER_DTYPES.get(args.get("dtype"), DTYPES[plan.config.train.precision])  # type: ignore[arg-type]
    weights = weights_bytes(model_config, dtype) // (args.get("tensor_parallel_size") or args.get("tp_size") or 1)
    setting, fix = f"engine.args.{key}={share:g}", "lower it"
    return (
        Part("server: weights", weights, setting, fix),
        Part("server: KV cache and the rest", int(total_bytes * share) - weights, setting, fix),
        Part("server: CUDA context", CONTEXT_BYTES, setting, fix),
    )


def _sequence_tokens(longest_prompt: int, sampling: SamplingParams, model_config: PretrainedConfig) -> int:
    """Tokens of the longest prompt and completion, or the model's context if that is less."""
    num_tokens = longest_prompt + sampling.max_new_tokens
    return min(num_tokens, getattr(model_config.get_text_config(), "max_position_embeddings", None) or num_tokens)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
