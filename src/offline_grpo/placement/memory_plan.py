"""What every GPU of a run will hold at its fullest, predicted part by part before any weights are loaded.

    a training process   weights + masters + gradients + optimizer state + reference + activations of the largest
    microbatch a server             its share of the GPU (engine.args.gpu_memory_utilization): weights, and what remains
    for the KV cache the host             masters + optimizer state of all processes, with train.optimizer.offload, and
    the processes themselves

Nothing here needs a GPU. The prediction is for the worst case: every completion as long as it may get.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from transformers import PretrainedConfig

from offline_grpo.interfaces import Layout, LossHead, OptimizerFactory
from offline_grpo.model.adapters import LanguageModel, unwrapped
from offline_grpo.model.dtypes import torch_dtype
from offline_grpo.model.footprint import Footprint, Microbatch, build_on_meta, measure, weights_bytes
from offline_grpo.model.layers import blocks_of
from offline_grpo.model.load import context_length
from offline_grpo.placement.device_plan import ACTIVATIONS, CONTEXT, GIB, SAMPLING, DevicePlan, Part
from offline_grpo.settings import ModelConfig, TrainConfig

CONTEXT_BYTES = 3 * GIB // 4  # CUDA context, kernels and cuBLAS workspaces of a process: 0.74 GiB on an H100
LOGITS_COPIES = 5  # float32 [rows, vocabulary] that sampling in process holds at once
HOST_PROCESS_BYTES = 4 * GIB  # of a process that uses CUDA: libraries, kernels, buffers; a server has two
SMALL_STATE_BYTES = 3  # per trained weight: an optimizer with less is as small as 8-bit AdamW


@dataclass(frozen=True)
class ServerRequest:
    """The servers that the run starts."""

    num_servers: int
    gpus: tuple[int, ...]  # of all of them: a GPU with several servers is there several times
    dtype: torch.dtype  # of their weights
    num_shards: int  # GPUs that the weights of each are split over
    share_frac: float  # of each GPU's memory
    share_key: str  # the setting that says so


@dataclass(frozen=True)
class MemoryRequest:
    """What the prediction depends on."""

    model: ModelConfig
    train: TrainConfig
    recompute: float  # the share of the blocks that are recomputed in the backward pass
    saved_by_compiling: int  # bytes for each block that is compiled and not recomputed; 0 where they are not compiled
    model_config: PretrainedConfig  # of the model to train
    reference_config: PretrainedConfig | None  # of a reference that is loaded beside it; None if there is none
    layout: Layout
    head: LossHead
    entropy_requires_grad: bool  # the loss has an entropy bonus
    optimizer: OptimizerFactory
    offload: bool  # its state, and the masters, are in the host's memory
    is_sharded: bool  # each process has a part of the weights (train.sharding=fsdp2)
    shares_weights: bool  # whether the first process's weights are the server's memory
    num_sequences: int  # of an iteration
    prompt_tokens: tuple[int, int]  # of the shortest and of the longest prompt
    max_new_tokens: int
    eval_max_new_tokens: int
    sampling_batch_size: int  # sequences that this process samples at once; 0 where a server does
    trainers: tuple[int, ...]  # the GPU of every training process, that of the first one first
    reference_is_beside: bool  # the reference is on the trainers' GPUs
    reference_gpu: int | None  # that it has for itself
    server: ServerRequest | None
    total_bytes: tuple[int, ...]  # memory of each GPU of this machine
    host_bytes: int  # that the host has left


def predict(request: MemoryRequest) -> list[DevicePlan]:
    """What every GPU that the run uses will hold, in the order of the GPUs, and then the host, if it holds what they
    would otherwise.
    """
    offload = request.offload
    footprint = measure(
        model_of(request),
        largest_microbatch(request),
        layout=request.layout,
        head=request.head,
        entropy_requires_grad=request.entropy_requires_grad,
        separate_masters=request.shares_weights or offload,
        saved_by_compiling=request.saved_by_compiling,
    )
    footprint = _part_of(footprint, request) if request.is_sharded else footprint
    masters, state = _optimizer_parts(request, footprint)
    gradients, reference = _static_parts(request, footprint)
    others = [
        *([] if offload else [masters, state]),
        gradients,
        *([reference] if request.reference_is_beside else []),
        _activations_part(request, footprint),
        _sampling_part(request, footprint),
        Part(CONTEXT, CONTEXT_BYTES, "model.device=cuda", "train on another GPU"),
    ]
    if request.is_sharded:
        others.append(_gathered_part(request))
    weights = Part(
        "policy weights", footprint.weights_bytes, f"model.train_id={request.model.train_id}", _smaller_model(request)
    )
    server = request.server
    devices = []
    of_reference = () if request.reference_gpu is None or not reference.num_bytes else (request.reference_gpu,)
    for gpu in sorted({*request.trainers, *of_reference, *(server.gpus if server is not None else ())}):
        processes = [process for process, trained_on in enumerate(request.trainers) if trained_on == gpu]
        owners = [process for process in processes if process > 0 or not request.shares_weights]
        trainer = tuple(part for part in [weights] * len(owners) + others * len(processes) if part.num_bytes > 0)
        if gpu in of_reference:
            trainer += (reference, Part(CONTEXT, CONTEXT_BYTES, f"model.ref_device=cuda:{gpu}", "use another GPU"))
        total_bytes = request.total_bytes[gpu]
        num_servers = 0 if server is None else server.gpus.count(gpu)
        served = (
            _server_parts(server, request.model_config, total_bytes, num_servers)
            if server is not None and num_servers
            else ()
        )
        devices.append(DevicePlan(gpu, total_bytes, trainer, served, num_servers))
    if offload:
        num_processes = len(request.trainers)
        others_bytes = HOST_PROCESS_BYTES * (num_processes + (2 * server.num_servers if server is not None else 0))
        held = [masters, state] * num_processes + [Part("processes", others_bytes, masters.setting, masters.fix)]
        devices.append(DevicePlan(None, request.host_bytes, tuple(held), ()))
    return devices


def _part_of(footprint: Footprint, request: MemoryRequest) -> Footprint:
    """What one process has with train.sharding=fsdp2: a part of fp32 weights, or of the frozen base under adapters,
    which it has whole.
    """
    num = len(request.trainers)
    if request.model.lora is not None:
        return replace(footprint, weights_bytes=ceil(footprint.weights_bytes / num))
    return replace(
        footprint,
        weights_bytes=ceil(footprint.weights_bytes * 4 / torch_dtype(request.train.precision).itemsize / num),
        masters_bytes=0,
        gradients_bytes=ceil(footprint.gradients_bytes / num),
        trained_shapes=tuple(
            torch.Size((ceil(shape[0] / num), *shape[1:])) for shape in footprint.trained_shapes if shape
        ),
    )


def _gathered_part(request: MemoryRequest) -> Part:
    """Whole weights: embeddings and head for the length of a pass, and two blocks, because the next one comes while one
    computes.

    With their gradients, once in fp32 as well, where the weights are trained.
    """
    model = unwrapped(model_of(request))
    sizes = [
        sum(p.nbytes for p in block.parameters())
        for block in blocks_of(model, model.config.get_text_config().num_hidden_layers)[1]
    ]
    rest, largest = sum(p.nbytes for p in model.parameters()) - sum(sizes), max(sizes)
    gradients = (
        0
        if request.model.lora is not None
        else rest + largest + largest * 4 // torch_dtype(request.train.precision).itemsize
    )
    fix = "choose a model with smaller blocks, or train.sharding=none"
    return Part("gathered embeddings and blocks", rest + 2 * largest + gradients, "train.sharding=fsdp2", fix)


def model_of(request: MemoryRequest) -> LanguageModel:
    """The model that is trained, on the meta device."""
    settings = {"precision": request.train.precision, "train_layer_indices": request.train.train_layer_indices}
    return build_on_meta(request.model_config, request.model, **settings, gradient_checkpointing=request.recompute)


def largest_microbatch(request: MemoryRequest) -> Microbatch:
    """A process's largest microbatch if every sequence is as long as it may get.

    Example: 100 sequences of 600 tokens per update and tokens_per_microbatch=2000 are microbatches of 4 rows of 500
    tokens. Of these, 1,666 are scored if up to 500 tokens are sampled and the shortest prompts, which may come
    together, have 100.
    """
    train = request.train
    sequence_tokens = _sequence_tokens(request, request.max_new_tokens)
    num_sequences = request.num_sequences
    if train.grad_accum_steps is not None:
        num_sequences = min(num_sequences, (train.batch_size or 1) * train.grad_accum_steps)
    elif train.updates_per_iteration is not None:
        num_sequences = ceil(num_sequences / train.updates_per_iteration)
    of_process = ceil(num_sequences / len(request.trainers))
    rows, row_tokens = min(of_process, train.batch_size or of_process), sequence_tokens
    if train.tokens_per_microbatch is not None and rows * sequence_tokens > train.tokens_per_microbatch:
        rows = ceil(train.tokens_per_microbatch / sequence_tokens)
        row_tokens = (
            max(train.tokens_per_microbatch, sequence_tokens) // rows
        )  # so that rows of any length add up to the limit
    num_scored = rows * max(1, min(request.max_new_tokens, row_tokens - 1))
    if train.tokens_per_microbatch is not None:
        most = rows * row_tokens * request.max_new_tokens // (request.prompt_tokens[0] + request.max_new_tokens)
        num_scored = min(most, of_process * request.max_new_tokens)
    return Microbatch(rows, row_tokens, num_scored, is_whole_update=rows * row_tokens >= of_process * sequence_tokens)


def _optimizer_parts(request: MemoryRequest, footprint: Footprint) -> tuple[Part, Part]:
    """Masters and state, which may be in the host's memory."""
    optimizer, model = request.train.optimizer, f"model.train_id={request.model.train_id}"
    state_bytes = request.optimizer.state_bytes(footprint.trained_shapes)
    if request.offload:
        setting, fix = "train.optimizer.offload=true", f"{_smaller_model(request)}, or a machine with more memory"
        return Part("fp32 masters", footprint.masters_bytes, setting, fix), Part(
            "optimizer state", state_bytes, setting, fix
        )
    has_small_state = state_bytes < SMALL_STATE_BYTES * sum(map(prod, footprint.trained_shapes))
    less_state = "use model/lora=default" if has_small_state else "use train/optimizer=adamw_8bit or model/lora=default"
    if "offload" in optimizer:
        less_state = f"use train.optimizer.offload=true, {less_state.removeprefix('use ')}"
    return (
        Part("fp32 masters", footprint.masters_bytes, model, _smaller_model(request)),
        Part("optimizer state", state_bytes, f"train.optimizer._target_={optimizer['_target_']}", less_state),
    )


def _static_parts(request: MemoryRequest, footprint: Footprint) -> tuple[Part, Part]:
    """What stays from one microbatch to the next, besides weights, masters and state."""
    train, reference = request.train, request.reference_config
    reference_bytes = weights_bytes(reference, torch_dtype(train.precision)) if reference is not None else 0
    reference_bytes = ceil(reference_bytes / len(request.trainers)) if request.is_sharded else reference_bytes
    return (
        Part(
            "gradients", footprint.gradients_bytes, f"model.train_id={request.model.train_id}", _smaller_model(request)
        ),
        Part(
            "reference weights",
            reference_bytes,
            f"train.kl_coef={train.kl_coef:g}",
            "train.kl_coef=0 loads no reference",
        ),
    )


def _smaller_model(request: MemoryRequest) -> str:
    return "choose a smaller model" if request.model.lora is not None else "use model/lora=default or a smaller model"


def _activations_part(request: MemoryRequest, footprint: Footprint) -> Part:
    """Of a microbatch, or, if that is more, what the optimizer's step and the sum over processes hold for a moment."""
    train = request.train
    scratch_bytes = request.optimizer.step_scratch_bytes(footprint.trained_shapes)
    if len(request.trainers) > 1 and not request.is_sharded:
        scratch_bytes = max(scratch_bytes, 2 * footprint.gradients_bytes)  # all gradients as one message, and its copy
    key = "tokens_per_microbatch" if train.tokens_per_microbatch is not None else "batch_size"
    fix = "lower it, which changes no gradient" + (
        "" if request.recompute else ", or set train.gradient_checkpointing=true"
    )
    return Part(ACTIVATIONS, max(footprint.activations_bytes, scratch_bytes), f"train.{key}={getattr(train, key)}", fix)


def _sampling_part(request: MemoryRequest, footprint: Footprint) -> Part:
    """What sampling in process needs beyond what training has given back by then: gradients and activations."""
    rows = request.sampling_batch_size
    setting, fix = f"generation.batch_size={rows}", "lower it, which changes no sample"
    if not rows:  # a server samples
        return Part(SAMPLING, 0, setting, fix)
    config: Any = request.model_config.get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sequence_tokens = _sequence_tokens(request, max(request.max_new_tokens, request.eval_max_new_tokens))
    layer_bytes = 2 * rows * sequence_tokens * num_kv_heads * head_dim * torch_dtype(request.train.precision).itemsize
    logits_bytes = LOGITS_COPIES * 4 * rows * config.vocab_size
    if request.is_sharded:  # in process, from weights that are gathered for it
        logits_bytes += weights_bytes(request.model_config, torch_dtype(request.train.precision))
    needed = layer_bytes * (config.num_hidden_layers + 1) + logits_bytes  # a layer's cache is copied when it grows
    beyond = max(0, needed - footprint.gradients_bytes - footprint.activations_bytes)
    return Part(SAMPLING, beyond, setting, fix)


def _server_parts(
    server: ServerRequest, model_config: PretrainedConfig, total_bytes: int, num_servers: int
) -> tuple[Part, Part, Part]:
    """Weights, what its share leaves for KV cache and the rest (below 0 if too little), and its CUDA context, which the
    share excludes.

    Of all servers on the GPU, whose shares add up.
    """
    weights = num_servers * (weights_bytes(model_config, server.dtype) // server.num_shards)
    setting, fix = f"{server.share_key}={server.share_frac:g}", "lower it"
    who = "server" if num_servers == 1 else f"{num_servers} servers"
    return (
        Part(f"{who}: weights", weights, setting, fix),
        Part(
            f"{who}: KV cache and the rest", int(num_servers * total_bytes * server.share_frac) - weights, setting, fix
        ),
        Part(f"{who}: CUDA context", num_servers * CONTEXT_BYTES, setting, fix),
    )


def _sequence_tokens(request: MemoryRequest, max_new_tokens: int) -> int:
    """Tokens of the longest prompt and completion, or the model's context if that is less."""
    num_tokens = request.prompt_tokens[1] + max_new_tokens
    return min(num_tokens, context_length(request.model_config) or num_tokens)
