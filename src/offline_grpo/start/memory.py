"""The memory plan: what every GPU of a run holds at its fullest, by formula, before any weights are loaded.

    a training process   weights + masters + optimizer state + reference + the most that one of these moments needs:
                         the loss head; the backward pass of the last block, and of the first; gradients on their way
                         between processes; sampling in process
    a server             its share of the GPU (engine.args.gpu_memory_utilization): weights, and the rest for KV cache
    the host             with train.optimizer.offload: masters + optimizer state of all processes, and the processes;
                         with train.activation_offload: the inputs of recomputed blocks

The parameters are counted on a model without memory (torch's meta device). The formula for activations is that of a
decoder with attention and a gated MLP. It lies above all that `benchmarks/model_sizes.py` measured on a GPU, by at
most a twentieth, and above the long sequences of `long_context.py`, by at most a tenth. The prediction is for the worst
case: every completion is as long as it may get.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, gcd
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import PretrainedConfig

from offline_grpo import progress
from offline_grpo.config.engine_spec import num_shards
from offline_grpo.config.parts import Plan
from offline_grpo.errors import ConfigError
from offline_grpo.generation.teacher import KEY
from offline_grpo.interfaces import TaskFacts
from offline_grpo.model.device import TORCH_NAMES, torch_dtype
from offline_grpo.model.layers import blocks_of, experts_of, is_compiled, layer_configs
from offline_grpo.model.load import (
    attention_of,
    build_on_meta,
    context_length,
    is_adapted_policy,
    prepare,
    read_model_config,
)
from offline_grpo.model.offload import FLIGHT
from offline_grpo.model.quantization import SERVER_BYTES, TRAINER_BYTES, quantized_sizes
from offline_grpo.placement.devices import Devices
from offline_grpo.settings import TrainConfig
from offline_grpo.train.advantage import is_url
from offline_grpo.train.optimizer import Adafactor, AdamW, AdamW8bit, is_offloaded

log = logging.getLogger(__name__)

GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 4  # CUDA context, kernels and cuBLAS workspaces of a process: 0.74 GiB on an H100
HEAD_TILES_BYTES = GIB // 2  # logits of a tile of the vocabulary, see model/lm_head.py
LOGITS_COPIES = 5  # float32 [rows, vocabulary] that sampling in process holds at once
HOST_PROCESS_BYTES = 4 * GIB  # of a process that uses CUDA: libraries, kernels, buffers; a server has two
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the blocks, recomputed; all of them cost a third of the time of an update
ROUNDING = 0.007  # of tensors: the allocator's blocks, cuBLAS' workspaces; no measured row needs more
MARGIN = 0.1  # of the activations, which are predicted worst; `choose_way` keeps it free
CGROUP = Path("/sys/fs/cgroup")  # version 2
SHARE_KEYS = ("gpu_memory_utilization", "mem_fraction_static")  # of vLLM and SGLang
DEFAULT_SHARE = 0.92  # vLLM's own
ACTIVATIONS = "activations"
ALLOCATOR = "rounding of the allocator"
STATE_BYTES: dict[type, float] = {AdamW: 8.0, AdamW8bit: 2 * (1 + 4 / 256), Adafactor: 0.0}
"""Optimizer state per weight; an optimizer from outside counts as AdamW. 8-bit AdamW has a scale for every 256 weights;
Adafactor's rows and columns are few."""


class Part(NamedTuple):
    """Memory on a GPU."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class DevicePlan:
    """A GPU's parts: those of its training processes, and of its servers weights, the rest of their share, and contexts
    (empty where it has none). The host has a plan, too, where it holds offloaded state; its `gpu` is None.
    """

    gpu: int | None
    total_bytes: int
    trainer: tuple[Part, ...]
    server: tuple[Part, ...]
    num_servers: int = 1  # that `server` adds up

    @property
    def name(self) -> str:
        return "the host" if self.gpu is None else f"GPU {self.gpu}"

    @property
    def needed_bytes(self) -> int:
        return sum(part.num_bytes for part in self.trainer + self.server)


@dataclass
class MemoryRequest:
    """A run's configuration, its models, and its GPUs."""

    plan: Plan
    model_config: PretrainedConfig  # of the model to train
    reference_config: PretrainedConfig | None  # of a reference that is loaded beside it; None if there is none
    prompt_tokens: tuple[int, int]  # of the shortest and of the longest prompt
    trainers: Sequence[int]  # the GPU of every training process, that of the first one first
    engine_gpus: Sequence[int]  # of all servers; a GPU with several is there several times
    total_bytes: Sequence[int]  # memory of each GPU of this machine
    reference_gpu: int | None = None  # that the reference, and a teacher, have for themselves
    teacher_config: PretrainedConfig | None = None  # of a teacher that is loaded; None if there is none

    def __post_init__(self) -> None:
        """Count the weights of the model to train, adapters included. Raises as `load_policy` does, and ConfigError for
        experts in 4 bits.
        """
        config = self.plan.config
        self.dtype = torch_dtype(config.train.precision)
        self.is_sharded = config.train.sharding == "fsdp2" and len(self.trainers) > 1  # each has a part of the weights
        bare: Any = build_on_meta(self.model_config, trust_remote_code=config.model.trust_remote_code)
        self.quantized = quantized_sizes(bare) if config.model.quantization is not None else []  # of layers in 4 bits
        experts = experts_of(bare)
        num_of_experts = sum(p.numel() for module in experts for p in module.parameters())
        if self.quantized and experts:
            of_all = sum(p.numel() for p in bare.parameters())
            gib = [_gib(num * self.dtype.itemsize) for num in (num_of_experts, of_all)]
            fix = f"leaves a mixture's experts as they are, {gib[0]} of {gib[1]}; use null, on GPUs that have the room"
            raise ConfigError("model.quantization", config.model.quantization, fix)
        with torch.device("meta"):
            model: Any = prepare(bare, config.model, config.train.train_layer_indices)
        # All weights, those that are trained, and those of each block.
        self.num_weights = sum(p.numel() for p in model.parameters())
        self.num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        try:
            blocks = list(blocks_of(bare))
        except ConfigError:  # it has no list of them
            blocks = []
        self.block_weights = [sum(p.numel() for p in block.parameters()) for block in blocks]
        embeddings, head = bare.get_input_embeddings().weight, bare.get_output_embeddings()
        are_trained = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        is_late = True in are_trained and not embeddings.requires_grad
        self.first_trained_block = are_trained.index(True) if is_late else 0  # earlier blocks keep no activations
        self.trains_head = head is not None and head.weight.requires_grad
        self.trains_experts = any(p.requires_grad for name, p in model.named_parameters() if ".experts." in name)
        is_merged = config.model.lora is not None and self.trains_experts  # a pass makes and keeps the sum of both
        self.num_merged = is_merged * num_of_experts // max(1, len(experts))  # of a block
        self.has_qk_norm = any(name.endswith(("q_norm", "q_layernorm")) for name, _ in bare.named_modules())

    def sequence_tokens(self, max_new_tokens: int) -> int:
        """Tokens of the longest prompt and completion, or the model's context if that is less."""
        num_tokens = self.prompt_tokens[1] + max_new_tokens
        return min(num_tokens, context_length(self.model_config) or num_tokens)

    def weights_bytes(self, itemsize: int, bytes_of_quantized: float) -> int:
        """Of the model to train."""
        num_quantized = sum(self.quantized)
        return (self.num_weights - num_quantized) * itemsize + int(num_quantized * bytes_of_quantized)


def check_memory(plan: Plan, model_id: str, *, prompt_tokens: tuple[int, int], devices: Devices) -> tuple[float, bool]:
    """Where `placement.check_memory` asks for it, refuse a run that the GPUs cannot hold; log the prediction.

    Returns the share of the blocks that are recomputed (`train.gradient_checkpointing`), and whether their inputs wait
    in the host's memory (`train.activation_offload`); on the CPU, `auto` does neither. `prompt_tokens`: of the shortest
    and of the longest prompt.
    """
    model, checks, ways = plan.config.model, plan.config.placement.check_memory, ways_of(plan.config.train)
    if not devices.trainers or not (checks or len(ways) > 1):
        return ways[0]
    with progress.phase("memory plan"):
        # Which models are on which GPUs.
        trust, reference = {"trust_remote_code": model.trust_remote_code}, None
        if plan.loss.kl_coef > 0 and not is_adapted_policy(model):  # else there is none, or it is the policy's base
            reference = read_model_config(model.ref_id or model_id, "model.ref_id", **trust)
        teacher = plan.advantage.teacher
        request = MemoryRequest(
            plan,
            read_model_config(model_id, "model.train_id", **trust),
            reference,
            prompt_tokens=prompt_tokens,
            trainers=devices.trainers,
            engine_gpus=[gpu for gpus in devices.servers for gpu in gpus or ()],
            total_bytes=[torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())],
            reference_gpu=devices.reference,
            teacher_config=None if teacher is None or is_url(teacher) else read_model_config(teacher, KEY, **trust),
        )

        # What they will hold; with `auto`, recomputing as little as fits.
        (share, offloads), predicted = choose_way(request)
        if plan.config.train.gradient_checkpointing == "auto":
            log.info("train.gradient_checkpointing=auto: recomputes %.0f%% of the blocks", 100 * share)
        if plan.config.train.activation_offload == "auto" and offloads:
            log.info("train.activation_offload=auto: the inputs of blocks wait in the host's memory")
        for line in describe(predicted):
            log.info(line)
        if checks:
            check(predicted)
        return share, offloads


def ways_of(train: TrainConfig) -> list[tuple[float, bool]]:
    """What the settings allow, the fastest first: the share of the blocks that is recomputed, and whether their inputs
    wait in the host's memory.
    """
    wanted, offload = train.gradient_checkpointing, train.activation_offload
    ways = [(share, offload is True) for share in (SHARES if wanted == "auto" else (float(wanted),))]
    return [*ways, (1.0, True)] if offload == "auto" and wanted is not False else ways


def choose_way(request: MemoryRequest) -> tuple[tuple[float, bool], list[DevicePlan]]:
    """The first of `ways_of` whose prediction fits, and that prediction; the last, where none does."""

    def fits(device: DevicePlan) -> bool:
        activations = sum(part.num_bytes for part in device.trainer if part.name == ACTIVATIONS)
        return device.needed_bytes + MARGIN * activations <= device.total_bytes

    ways = ways_of(request.plan.config.train)
    plans = ((way, predict(request, *way)) for way in ways)
    return next(plan for plan in plans if plan[0] == ways[-1] or all(map(fits, plan[1])))


def predict(request: MemoryRequest, recompute: float = 0.0, offloads: bool = False) -> list[DevicePlan]:
    """A plan for every GPU that the run uses, in order, and then for the host, if it holds offloaded state.
    `recompute`: the share of the blocks that are recomputed in the backward pass. `offloads`: their inputs wait in the
    host's memory.
    """
    plan, dtype = request.plan, request.dtype
    model, itemsize, offload = plan.config.model, request.dtype.itemsize, is_offloaded(plan.optimizer)
    has_adapters, shares_weights = model.lora is not None, plan.weight_sync.requires.shares_weights
    num_parts = len(request.trainers) if request.is_sharded else 1  # of which each process has one
    is_fp32 = request.is_sharded and not has_adapters  # FSDP2 keeps whole models in fp32, which are their own masters

    # Weights of the policy, and of the frozen models beside it.
    weights_bytes = request.weights_bytes(4 if is_fp32 else itemsize, TRAINER_BYTES)
    weights = Part("policy weights", ceil(weights_bytes / num_parts))
    frozen = [
        Part(f"{name} weights", ceil(_num_weights(model_config) * itemsize / num_parts))
        for name, model_config in (("reference", request.reference_config), ("teacher", request.teacher_config))
        if model_config is not None
    ]

    # Masters and the state of the optimizer, in fp32, of what a process trains.
    num_trained = request.num_trained if has_adapters else ceil(request.num_trained / num_parts)
    has_masters = (dtype != torch.float32 or (shares_weights and not has_adapters) or offload) and not is_fp32
    state_bytes = int(STATE_BYTES.get(type(plan.optimizer), STATE_BYTES[AdamW]) * num_trained)
    optimizer = [Part("fp32 masters", 4 * num_trained * has_masters), Part("optimizer state", state_bytes)]

    # With fsdp2 whole weights: embeddings and head for the length of a pass, and in its backward half two blocks, as
    # the next one comes while one computes; with their gradients, once in fp32 as well, where the weights are trained.
    gathered_by_head, gathered_by_blocks = 0, 0
    if request.is_sharded:
        rest, largest = request.num_weights - sum(request.block_weights), max(request.block_weights, default=0)
        gathered_by_head = rest * itemsize
        gathered_by_blocks = (rest + 2 * largest) * itemsize
        gathered_by_blocks += 0 if has_adapters else (rest + largest) * itemsize + 4 * largest

    # The moments at which it may hold most. An update begins without gradients, so the first microbatch finds none, and
    # has all in the end; with more than one, the last finds those before it. Processes that have all weights add up all
    # gradients as one message, of which there is a copy.
    gradients = Part("gradients", 4 * num_trained)
    found = gradients._replace(num_bytes=gradients.num_bytes * has_several_microbatches(request))
    in_head, in_last, in_first = _activations_bytes(request, recompute, offloads)
    of_head, of_blocks = (Part("gathered embeddings and blocks", n) for n in (gathered_by_head, gathered_by_blocks))
    is_summed = len(request.trainers) > 1 and not request.is_sharded
    moments = (
        (found, Part(ACTIVATIONS, in_head), of_head),
        (found, Part(ACTIVATIONS, in_last), of_blocks),
        (gradients, Part(ACTIVATIONS, in_first), of_blocks),
        (gradients, Part("gradients between processes", 2 * gradients.num_bytes * is_summed)),
    )
    fullest = max(moments, key=lambda parts: sum(part.num_bytes for part in parts))

    # Before all of that, sampling in process has a KV cache and logits. A layer's cache is copied when it grows; of
    # episodes, as many sequences are kept for their next turns. A sharded policy is gathered.
    sampling_bytes = 0
    if not plan.engine.needs_server:
        rows, text = plan.engine.client_node.get("batch_size", 1), request.model_config.get_text_config()
        longest = request.sequence_tokens(max(plan.sampling.max_new_tokens, plan.eval_sampling.max_new_tokens))
        layer_bytes = 2 * rows * longest * _widths(text)[1] * itemsize
        num_layers = text.num_hidden_layers * (2 if TaskFacts.of(plan.data.task).plays else 1) + 1
        sampling_bytes = layer_bytes * num_layers + LOGITS_COPIES * 4 * rows * text.vocab_size
        sampling_bytes += request.num_weights * itemsize * request.is_sharded

    context = Part("CUDA context", CONTEXT_BYTES)
    others = [
        *([Part("adapters", request.num_trained * itemsize)] if has_adapters and shares_weights else []),
        *([] if offload else optimizer),
        *(frozen if request.reference_gpu is None and model.ref_device != "cpu" else []),
        *fullest,
        Part("KV cache of sampling, beyond these", max(0, sampling_bytes - sum(part.num_bytes for part in fullest))),
        context,
        Part("dequantised layers", 2 * max(request.quantized, default=0) * itemsize),  # one, and the one before it
    ]

    # Who is on which GPU. Where weights are shared, those of the first process are the server's memory.
    devices = []
    of_reference = () if request.reference_gpu is None or not frozen else (request.reference_gpu,)
    for gpu in sorted({*request.trainers, *of_reference, *request.engine_gpus}):
        processes = [process for process, trained_on in enumerate(request.trainers) if trained_on == gpu]
        owners = [process for process in processes if process > 0 or not shares_weights]
        trainer = tuple(part for part in [weights] * len(owners) + others * len(processes) if part.num_bytes > 0)
        if gpu in of_reference:
            trainer += (*frozen, context)
        if trainer:
            trainer += (Part(ALLOCATOR, int(ROUNDING * sum(part.num_bytes for part in trainer))),)
        num_servers = request.engine_gpus.count(gpu)
        served = _server_parts(request, request.total_bytes[gpu], num_servers) if num_servers else ()
        devices.append(DevicePlan(gpu, request.total_bytes[gpu], trainer, served, num_servers))
    if offload or offloads:
        num_processes = len(request.trainers) + (2 * plan.engine.num_managed if request.engine_gpus else 0)
        waiting = offloads * sum(_recomputed_inputs(request, recompute))
        of_process = [*(optimizer if offload else ()), Part("inputs of blocks", waiting)]
        parts = *of_process * len(request.trainers), Part("processes", HOST_PROCESS_BYTES * num_processes)
        parts = tuple(part for part in parts if part.num_bytes > 0)
        # What the host can give without swapping: the machine, or its control group (a container) if that has less.
        available, limit = psutil.virtual_memory().available, CGROUP / "memory.max"
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            reclaimable = int(stat["inactive_file"])
            used = int((CGROUP / "memory.current").read_text()) - reclaimable
            available = max(0, min(available, int(most) - used))
        devices.append(DevicePlan(None, available, parts, ()))
    return devices


def _num_weights(model_config: PretrainedConfig) -> int:
    return sum(p.numel() for p in build_on_meta(model_config).parameters())


def has_several_microbatches(request: MemoryRequest) -> bool:
    """Whether a process may have more than one in an update."""
    train, num_sequences = request.plan.config.train, _sequences_of_process(request)
    if TaskFacts.of(request.plan.data.task).plays:  # an episode has one sequence or more
        return True
    if train.tokens_per_microbatch is None:
        return num_sequences > (train.batch_size or num_sequences)
    num_tokens = num_sequences * request.sequence_tokens(request.plan.sampling.max_new_tokens)
    return num_sequences > 1 and num_tokens > train.tokens_per_microbatch


def _sequences_of_process(request: MemoryRequest) -> int:
    """In one update."""
    train, data = request.plan.config.train, request.plan.config.data
    num_sequences = data.problems_per_iteration * data.rollouts_per_problem
    if train.grad_accum_steps is not None:
        num_sequences = min(num_sequences, (train.batch_size or 1) * train.grad_accum_steps)
    elif train.updates_per_iteration is not None:
        num_sequences = ceil(num_sequences / train.updates_per_iteration)
    return ceil(num_sequences * train.sequence_parallel / len(request.trainers))


def largest_microbatch(request: MemoryRequest) -> tuple[int, int]:
    """A process's largest microbatch if every sequence is as long as it may get: its tokens, and how many of them are
    scored; of its slice, where processes share sequences (`train.sequence_parallel`).

    Example: of 2000 tokens, with up to 500 sampled after prompts of 100 or more, at most 5/6 are scored.
    """
    train, max_new_tokens = request.plan.config.train, request.plan.sampling.max_new_tokens
    sequence_tokens, of_process = request.sequence_tokens(max_new_tokens), _sequences_of_process(request)
    # In microbatches of so many sequences, or of so many tokens.
    rows, limit = min(of_process, train.batch_size or of_process), train.tokens_per_microbatch
    num_tokens, scored = rows * sequence_tokens, rows * max(1, min(max_new_tokens, sequence_tokens - 1))
    if limit is not None and num_tokens > limit:
        num_tokens = max(limit, sequence_tokens)
        most = num_tokens * max_new_tokens // (request.prompt_tokens[0] + max_new_tokens)
        scored = min(most, of_process * max_new_tokens)
    of_slice = ceil(num_tokens / train.sequence_parallel)
    return of_slice, min(scored, of_slice)


def _recomputed_inputs(request: MemoryRequest, recompute: float) -> list[int]:
    """Bytes of a microbatch's input of each block that is recomputed."""
    config, (num_tokens, _) = request.model_config.get_text_config(), largest_microbatch(request)
    num_recomputed = round((config.num_hidden_layers - request.first_trained_block) * recompute)
    return num_recomputed * [num_tokens * config.hidden_size * request.dtype.itemsize]


def _activations_bytes(request: MemoryRequest, recompute: float, offloads: bool) -> tuple[int, int, int]:
    """Of a microbatch: in the loss head, and in the backward pass of the last block and of the first. In between they
    become fewer as evenly as gradients become more, so the sum of both is at its largest at one of the ends.
    """
    config, dtype = request.model_config.get_text_config(), request.dtype
    num_tokens, scored = largest_microbatch(request)
    itemsize, hidden_size, vocab_size = dtype.itemsize, config.hidden_size, config.vocab_size
    query, key, mlp, routed = _widths(config)

    # What a block keeps of a token: inputs and outputs of its matrix products and attention. A norm that is not
    # compiled keeps its input and its result in fp32 too, and the MLP its activations.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiled = is_compiled(request.plan.config.model.compile, device)
    of_norm = 1 if compiled else (4 if itemsize == 2 else 3)  # numbers, besides the compiled one's input
    numbers = 2 * hidden_size * (of_norm + compiled) + 2 * (query + key)
    of_mlp = (3 if compiled else 4) * mlp
    if routed:  # of frozen experts no gradient asks for the inputs of their products
        numbers += (1 + request.trains_experts) * routed
        of_mlp -= (not request.trains_experts) * mlp
    if request.has_qk_norm:
        numbers += of_norm * (query + key)
    if not compiled:
        numbers += 2 * (query - key)  # keys and values, repeated for the heads that share them
        if request.plan.config.model.lora is not None:  # a result of each adapter, as peft's own layers have it
            numbers += query + 2 * key + 2 * hidden_size
            of_mlp += 0 if routed else 2 * mlp

    # Processes that share sequences send queries, and repeat the keys' heads where there are fewer.
    if (size := request.plan.config.train.sequence_parallel) > 1:
        kv_heads = getattr(config, "num_key_value_heads", None) or size
        numbers += 2 * query + 2 * key * (size // gcd(size, kv_heads) - 1)

    # Attention keeps two fp32 numbers of a head, the softmax's sum and a norm's scale; its scores where no flash
    # attention runs, such as sdpa's kernel for fp32 and fewer keys.
    heads = getattr(config, "num_attention_heads", None) or 0
    is_eager = attention_of(request.model_config, request.plan.config.model.attn_implementation) == "eager"
    has_scores = is_eager or (dtype == torch.float32 and query != key)
    row_tokens = request.sequence_tokens(request.plan.sampling.max_new_tokens)
    of_attention = heads * row_tokens * (4 if itemsize == 4 else 6) * has_scores
    of_attention += 4 * heads * (2 if request.has_qk_norm else 1)
    merged = request.num_merged * itemsize
    block = num_tokens * (numbers * itemsize + of_attention) + merged

    # The MLP's part of it; in tiles, which are computed again, one of them. Experts are computed at once.
    tile = num_tokens if routed else min(num_tokens, request.plan.config.model.mlp_tile_tokens or num_tokens)
    if tile == num_tokens:
        block += num_tokens * of_mlp * itemsize

    # Blocks that are recomputed keep their input, here or with the host.
    inputs, hidden = _recomputed_inputs(request, recompute), num_tokens * hidden_size * itemsize
    num_recomputed = len(inputs)
    here = sum(inputs[:FLIGHT] if offloads else inputs)
    kept = block * (config.num_hidden_layers - request.first_trained_block - num_recomputed) + here

    # The last block's result and its norm, and the scored rows of it.
    edges = 2 * hidden + scored * hidden_size * itemsize

    # In the loss head: tiles of logits, those that it keeps, and in its backward pass the fp32 sum that becomes the
    # gradient of those rows, and a product; and the gradient of the embeddings, if they are trained.
    keeps_tiles = dtype == torch.bfloat16 and request.plan.loss.entropy_coef == 0
    kept_gib = getattr(request.plan.head, "kept_gib", 0) if keeps_tiles else 0  # a head from outside keeps nothing
    kept_by_head = min(int(kept_gib * GIB), 2 * scored * vocab_size)
    of_weights = request.trains_head * vocab_size * hidden_size * itemsize
    tiles = min(HEAD_TILES_BYTES, 8 * scored * vocab_size)
    backward = 10 * scored * hidden_size + of_weights
    head = kept_by_head + (max(tiles, backward) if kept_by_head else tiles + tiles // 4 + backward)

    # In a block: gradients inside the MLP, or of what experts return; and the gradient of embeddings that are the head
    # too, which is complete in their own backward pass.
    in_mlp = (1 + (request.plan.config.model.lora is not None) if compiled else 3) * mlp
    in_block = tile * itemsize * max(in_mlp, (2 if compiled else 3) * routed)
    in_block += merged  # their gradient
    if tile < num_tokens:
        in_block += tile * of_mlp * itemsize + hidden  # the results, put together
    in_block += of_weights if getattr(config, "tie_word_embeddings", True) else 0

    # The last one adds what it recomputes. The first has what it kept or recomputes, the gradient of its result, and
    # inputs: its own, and with the host's memory in between those that have not left yet.
    in_last = kept + edges + in_block + (block if num_recomputed else 0)
    in_first = block + hidden + sum(inputs[: FLIGHT if offloads else 1]) + in_block
    return int(kept + edges + head), int(in_last), int(in_first)


def _widths(config: Any) -> tuple[int, int, int, int]:
    """Of queries, of keys (and values), of the MLP, and of what is routed to experts: for each token, in the widest
    layer of each.
    """
    found = []
    for layer in layer_configs(config):
        heads = getattr(layer, "num_attention_heads", None) or 1
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        mlp, routed = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size, 0
        experts = getattr(layer, "num_experts_per_tok", None)
        if isinstance(experts, int):
            one = getattr(layer, "moe_intermediate_size", None) or mlp
            shared = getattr(layer, "n_shared_experts", None) or 0
            of_shared = getattr(layer, "shared_expert_intermediate_size", None) or shared * one
            mlp, routed = max(mlp, experts * one + of_shared), experts * layer.hidden_size
        found.append((heads * head_dim, kv_heads * head_dim, mlp, routed))
    query, key, mlp, routed = map(max, zip(*found, strict=True))
    return query, key, mlp, routed


def _server_parts(request: MemoryRequest, total_bytes: int, num_servers: int) -> tuple[Part, Part, Part]:
    """Of all servers on the GPU, whose shares add up: weights, what their share leaves for KV cache and the rest (below
    0 if too little), and CUDA contexts, which the share excludes.
    """
    # The weights, in the format that the server has them in.
    args, dtype = request.plan.server_args, request.plan.server_args.get("dtype")
    served = torch_dtype(dtype) if dtype in TORCH_NAMES else request.dtype  # auto is the model's own
    weights_bytes = _num_weights(request.model_config) * served.itemsize
    if args.get("quantization") == "bitsandbytes":
        weights_bytes = request.weights_bytes(served.itemsize, SERVER_BYTES)
    if "fp8" in (args.get("quantization") or ""):
        weights_bytes -= sum(request.block_weights) * (served.itemsize - 1)
    weights = num_servers * (weights_bytes // num_shards(args))

    # Its share of the GPU is for weights and KV cache; the context comes on top.
    key = next((key for key in SHARE_KEYS if key in args), SHARE_KEYS[0])
    share_bytes = int(num_servers * total_bytes * (args.get(key) or DEFAULT_SHARE))
    who = "server" if num_servers == 1 else f"{num_servers} servers"
    rest = Part(f"{who}: KV cache and the rest", share_bytes - weights)
    return Part(f"{who}: weights", weights), rest, Part(f"{who}: CUDA context", num_servers * CONTEXT_BYTES)


def describe(devices: Sequence[DevicePlan]) -> list[str]:
    """A small table: one line per part, in GiB."""
    lines = []
    for device in devices:
        needed, total = _gib(device.needed_bytes), _gib(device.total_bytes)
        lines.append(f"{device.name}: predicted to hold {needed} of {total} at its fullest")
        lines += [f"  {part.num_bytes / GIB:8.2f} GiB  {part.name}" for part in device.trainer + device.server]
    return lines


def check(devices: Sequence[DevicePlan]) -> None:
    """Raise ConfigError, with the largest parts, for what cannot fit."""
    for device in devices:
        if device.needed_bytes <= device.total_bytes:
            continue
        fix = (
            "choose a smaller model or model/lora=default, train.optimizer.offload=true or train/optimizer=adamw_8bit, "
            "train.gradient_checkpointing=true, or fewer train.tokens_per_microbatch, train.batch_size or "
            "generation.batch_size"
        )
        if device.server and (room := room_for_server(device, total_bytes=device.total_bytes)) is not None:
            fix = f"lower the server's share, engine.args.{' or '.join(SHARE_KEYS)}, to {room:.2f}"
        parts = sorted(device.trainer + device.server, key=lambda part: -part.num_bytes)
        held = ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in parts[:4])
        raise ConfigError(
            f"placement.check_memory=true: {device.name} has {_gib(device.total_bytes)} and would have to hold "
            f"{_gib(device.needed_bytes)} ({held}, ...); {fix}; placement.check_memory=false starts all the same"
        )


def room_for_server(device: DevicePlan, *, total_bytes: int) -> float | None:
    """The largest share of a GPU of `total_bytes` that each server may have beside the trainer; None if its weights
    need more.
    """
    weights, _, context = device.server
    trainer_bytes = sum(part.num_bytes for part in device.trainer)
    room = floor((total_bytes - trainer_bytes - context.num_bytes) / device.num_servers / total_bytes * 100) / 100
    has_cache = device.num_servers * room * total_bytes >= 1.1 * weights.num_bytes
    return room if has_cache else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
