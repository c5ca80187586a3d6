"""The memory that training a model needs on a GPU, found out without one and without the weights.

The model is built on the meta device, whose tensors have a shape, a format and no memory. One or two microbatches run through it, forward
and backward, by the code that trains, and a dispatch mode adds up what is alive after every operation. So any architecture, tied
embeddings, adapters and gradient checkpointing are counted as they are, and nothing has to be known about them here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig

from offline_grpo.model.adapters import LanguageModel
from offline_grpo.model.forward import hidden_states
from offline_grpo.model.load import DTYPES, prepare
from offline_grpo.model.logprobs import head_stats
from offline_grpo.model.masters import MasterWeights
from offline_grpo.model.policy import Scorer
from offline_grpo.settings import ModelConfig
from offline_grpo.types import TokenBatch

META = torch.device("meta")
CUDA_SDPA = "offline_grpo_cuda_sdpa"


@dataclass(frozen=True)
class Microbatch:
    """The sizes of the largest microbatch: `num_sequences` rows of `num_tokens` tokens, of which `num_completion_tokens` are scored."""

    num_sequences: int
    num_tokens: int
    num_completion_tokens: int
    is_whole_update: bool  # no other microbatch's gradients are there while it runs


@dataclass(frozen=True)
class Footprint:
    """Bytes on the GPU that computes."""

    weights_bytes: int
    masters_bytes: int  # 0 where the weights are their own masters
    gradients_bytes: int  # of the trained weights, fp32, after a backward pass
    activations_bytes: int  # by how much a microbatch's peak exceeds the sum of the above
    trained_shapes: tuple[torch.Size, ...]


def allocated_bytes(num_bytes: int) -> int:
    """What torch's CUDA allocator gives to a tensor of so many bytes: the next multiple of 512."""
    return -(-num_bytes // 512) * 512


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operations inside make, until they are freed: `now`, and its maximum `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors made outside, each piece of memory once. Returns `now`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                num_bytes = allocated_bytes(storage.nbytes())
                self._known.add(key)
                self.now += num_bytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, num_bytes).atexit = False
        return self.now

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # transformers asks whether positions are consecutive; meta tensors cannot say
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def build_on_meta(
    model_config: PretrainedConfig, config: ModelConfig, *, precision: str, train_layer_indices: str | None, gradient_checkpointing: bool
) -> LanguageModel:
    """The model as `load_policy` would return it, with adapters, frozen blocks and checkpointing, but without weights. Raises likewise."""
    attention = "eager" if config.attn_implementation == "eager" else "sdpa"  # the others keep what CUDA's sdpa keeps
    with META:
        model = AutoModelForCausalLM.from_config(model_config, dtype=DTYPES[precision], attn_implementation=attention)
        return prepare(model, config, train_layer_indices=train_layer_indices, gradient_checkpointing=gradient_checkpointing)


def weights_bytes(model_config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the bare model's parameters and buffers; tied ones once."""
    with META:
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    return LiveBytes().add([*model.parameters(), *model.buffers()])


def measure(
    model: LanguageModel, microbatch: Microbatch, *, packing: str, separate_masters: bool, entropy_requires_grad: bool
) -> Footprint:
    """Run `microbatch` through a model of `build_on_meta`, twice unless it is a whole update: the second time gradients exist already.

    Args:
        packing: "padded" or "varlen"; "tree" counts as padded, which needs no less.
        separate_masters: fp32 weights have masters too (see `MasterWeights`).
    """
    scorer = Scorer(model, "varlen" if packing == "varlen" else "padded")
    config: Any = scorer.causal_lm.get_decoder().config
    if config._attn_implementation == "sdpa":
        config._attn_implementation = CUDA_SDPA
    model.train()
    live = LiveBytes()
    weights_bytes = live.add([*model.parameters(), *model.buffers()])
    with live:
        masters = MasterWeights(model.named_parameters(), separate=separate_masters)
        static_bytes = live.now
        for _ in range(1 if microbatch.is_whole_update else 2):
            _forward_backward(scorer, microbatch, entropy_requires_grad)
        gradients_bytes = live.now - static_bytes
    return Footprint(
        weights_bytes=weights_bytes,
        masters_bytes=static_bytes - weights_bytes,
        gradients_bytes=gradients_bytes,
        activations_bytes=live.peak - static_bytes - gradients_bytes,
        trained_shapes=tuple(p.shape for p in masters.parameters.values()),
    )


def _forward_backward(scorer: Scorer, microbatch: Microbatch, entropy_requires_grad: bool) -> None:
    """What `Updater` does with a microbatch, up to the loss, whose vectors [T] are small."""
    hidden = hidden_states(scorer.causal_lm.get_decoder(), _batch(microbatch), scorer.packing)  # [T, H]
    head: Any = scorer.causal_lm.get_output_embeddings()
    targets = torch.empty(microbatch.num_sequences * microbatch.num_completion_tokens, dtype=torch.int64, device=META)  # [N]
    stats = head_stats(
        hidden[targets],
        head.weight,
        head.bias,
        targets,
        torch.empty(len(targets), device=META),
        entropy_requires_grad=entropy_requires_grad,
    )
    del hidden
    with scorer.attention():
        torch.stack([value.sum() for value in stats if value.requires_grad]).sum().backward()


def _batch(microbatch: Microbatch) -> TokenBatch:
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
    """The kernel that torch chooses on CUDA for causal attention, [S, L, heads, D]; on the meta device it would be the slow one.

    Flash attention computes in 16 bit, with fewer key than query heads too; the memory-efficient kernel takes fp32, but as many heads only;
    what is left for the rest keeps all scores.
    """
    if query.dtype in (torch.bfloat16, torch.float16):
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scaling)[0]
    elif query.shape[1] == key.shape[1]:
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True, scale=scaling)[0]
    else:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(CUDA_SDPA, _cuda_sdpa)
AttentionMaskInterface.register(CUDA_SDPA, lambda *_args, **_kwargs: None)
