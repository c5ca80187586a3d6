"""The memory that training a model needs on a GPU, found out without one and without the weights.

The model is built on the meta device, whose tensors have a shape, a format and no memory. One or two microbatches run
through it, forward and backward, by the code that trains, and `LiveBytes` adds up what is alive after every operation.
So any architecture, tied embeddings, adapters and gradient checkpointing are counted as they are, and nothing has to be
known about them here.

The loss head is the exception: a kernel may not run on the meta device. A stand-in has its results and gradients, and
holds as much memory as its `scratch_bytes` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig

from offline_grpo.interfaces import Layout, LossHead
from offline_grpo.model.adapters import LanguageModel, unwrapped
from offline_grpo.model.dtypes import torch_dtype
from offline_grpo.model.layers import blocks_of
from offline_grpo.model.layouts.padded import Padded
from offline_grpo.model.live_bytes import LiveBytes
from offline_grpo.model.load import attention_of, prepare
from offline_grpo.model.logits import decoder_of, output_embeddings
from offline_grpo.model.masters import MasterWeights
from offline_grpo.model.scoring import prepare_for_gradients
from offline_grpo.settings import ModelConfig
from offline_grpo.types import TokenBatch

META = torch.device("meta")
CUDA_SDPA = "offline_grpo_cuda_sdpa"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Microbatch:
    """The sizes of the largest microbatch: `num_sequences` rows of `num_tokens` tokens, `num_scored` of which, of all
    rows, are scored.
    """

    num_sequences: int
    num_tokens: int
    num_scored: int
    is_whole_update: bool  # no other microbatch's gradients are there while it runs


@dataclass(frozen=True)
class Footprint:
    """Bytes on the GPU that computes."""

    weights_bytes: int
    masters_bytes: int  # 0 where the weights are their own masters
    gradients_bytes: int  # of the trained weights, fp32, after a backward pass
    activations_bytes: int  # by how much a microbatch's peak exceeds the sum of the above
    trained_shapes: tuple[torch.Size, ...]


def build_on_meta(
    model_config: PretrainedConfig,
    config: ModelConfig,
    *,
    precision: str,
    train_layer_indices: str | None,
    gradient_checkpointing: float,
) -> LanguageModel:
    """The model as `load_policy` would return it, with adapters, frozen blocks and checkpointing, but without weights.
    Raises likewise.
    """
    attention = attention_of(model_config, config.attn_implementation)
    if attention not in (None, "eager"):
        attention = "sdpa"  # the others keep what CUDA's sdpa keeps
    with META:
        trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch_dtype(precision), attn_implementation=attention, **trust
        )
        return prepare(
            model, config, train_layer_indices=train_layer_indices, gradient_checkpointing=gradient_checkpointing
        )


def weights_bytes(model_config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the bare model's parameters and buffers; tied ones once."""
    with META:
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    return LiveBytes().add([*model.parameters(), *model.buffers()])


def measure(
    model: LanguageModel,
    microbatch: Microbatch,
    *,
    layout: Layout,
    head: LossHead,
    entropy_requires_grad: bool,
    separate_masters: bool,
    saved_by_compiling: int = 0,
) -> Footprint:
    """Run `microbatch` through a model of `build_on_meta`, twice unless it is a whole update: the second time gradients
    exist already.

    Args:
        entropy_requires_grad: see `LossHead`.
        separate_masters: fp32 weights have masters too (see `MasterWeights`).
        saved_by_compiling: see `compiled_footprint`.
    """
    decoder: Any = decoder_of(unwrapped(model))
    layout = layout_on_meta(decoder, layout)
    head_bytes = partial(head.scratch_bytes, device=torch.device("cuda"), entropy_requires_grad=entropy_requires_grad)
    prepare_for_gradients(model)
    live = LiveBytes()
    weights_bytes = live.add([*model.parameters(), *model.buffers()])
    with live:
        masters = MasterWeights(model.named_parameters(), separate=separate_masters)
        static_bytes = live.now
        for _ in range(1 if microbatch.is_whole_update else 2):
            _forward_backward(model, microbatch, layout, head_bytes)
            masters.accumulate()
        gradients_bytes = live.now - static_bytes
    activations_bytes = live.peak - static_bytes - gradients_bytes
    if saved_by_compiling:
        blocks = blocks_of(decoder, decoder.config.get_text_config().num_hidden_layers)[1]
        num_kept = sum(not getattr(block, "gradient_checkpointing", False) for block in blocks)
        activations_bytes -= max(1, num_kept) * saved_by_compiling  # one is there while it is recomputed
    return Footprint(
        weights_bytes=weights_bytes,
        masters_bytes=static_bytes - weights_bytes,
        gradients_bytes=gradients_bytes,
        activations_bytes=activations_bytes,
        trained_shapes=tuple(p.shape for p in masters.parameters.values()),
    )


def layout_on_meta(decoder: Any, layout: Layout) -> Layout:
    """The layout that runs there in place of `layout`, with the attention of CUDA; padded rows where the architecture
    refuses `layout`.
    """
    if not decoder._supports_attention_backend:  # Falcon calls no attention but its own, and is trained in padded rows
        return Padded()
    if decoder.config._attn_implementation == "sdpa":
        decoder.config._attn_implementation = CUDA_SDPA
    planned = layout.for_memory_plan()
    try:
        with torch.no_grad():
            planned.hidden_states(decoder, batch_of(Microbatch(2, 4, 4, is_whole_update=True)))
    except Exception as error:  # whatever an architecture raises: `settle_layout` takes another one then
        log.debug("the memory of %s is that of padded rows (%s)", type(decoder).__name__, error)
        return Padded()
    return planned


def _forward_backward(
    model: LanguageModel, microbatch: Microbatch, layout: Layout, head_bytes: Callable[..., int]
) -> None:
    """What `Updater` does with a microbatch, up to the loss, whose vectors [T] are small."""
    decoder, output = decoder_of(unwrapped(model)), output_embeddings(unwrapped(model))
    batch = batch_of(microbatch)
    hidden = layout.hidden_states(decoder, batch)  # [T, H]
    at = torch.empty(microbatch.num_scored, dtype=torch.int64, device=META)  # [N]
    vocab_size, hidden_size = output.weight.shape
    scratch_bytes = head_bytes(num_tokens=len(at), hidden_size=hidden_size, vocab_size=vocab_size, dtype=hidden.dtype)
    logprobs = _HeadStandIn.apply(hidden[at], output.weight, output.bias, scratch_bytes)  # [N]
    del hidden
    with layout.attention(decoder, batch):
        logprobs.sum().backward()


class _HeadStandIn(torch.autograd.Function):
    """Allocates what a loss head does: its scratch memory, one of its results, and the gradients of what is trained."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, scratch_bytes: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.scratch_bytes = scratch_bytes
        _ = torch.empty(scratch_bytes, dtype=torch.uint8, device=META)
        return torch.empty(len(hidden), device=META)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = torch.empty(ctx.scratch_bytes, dtype=torch.uint8, device=META)
        inputs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(torch.empty_like(tensor) if is_needed else None for tensor, is_needed in inputs), None)


def batch_of(microbatch: Microbatch) -> TokenBatch:
    """A batch of these sizes on the meta device."""
    num_tokens = microbatch.num_sequences * microbatch.num_tokens
    ids = torch.empty(num_tokens, dtype=torch.int64, device=META)
    values = torch.empty(num_tokens, device=META)
    return TokenBatch(
        token_ids=ids,
        position_ids=ids,
        sequence_ids=ids,
        completion_mask=ids.bool(),
        advantages=values,
        rollout_logprobs=values,
        old_logprobs=values,
        ref_logprobs=None,
        temperature=values,
        sequence_lengths=(microbatch.num_tokens,) * microbatch.num_sequences,
    )


def _cuda_sdpa(
    module: torch.nn.Module,
    query: Tensor,  # [S, heads, L, D]
    key: Tensor,  # [S, kv_heads, L, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The kernel that torch chooses on CUDA for causal attention, [S, L, heads, D]; on the meta device it would be the
    slow one.

    Flash attention computes in 16 bit, with fewer key than query heads too, but values must be as wide as keys; the
    memory-efficient kernel takes fp32 and values of any width, but as many heads only; what is left for the rest keeps
    all scores.
    """
    if query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scaling)[0]
    elif query.shape[1] == key.shape[1]:
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, True, scale=scaling
        )[0]
    else:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(CUDA_SDPA, _cuda_sdpa)
AttentionMaskInterface.register(CUDA_SDPA, lambda *_args, **_kwargs: None)
