"""Faster decoding steps. On a GPU a step is a CUDA graph (`graphed_steps`): its kernels are launched together, not one
after the other by Python. For a cache of fixed size transformers' `generate` would compile the model, which takes
minutes; a graph of the same pass takes a second.

Attention of a single new token reads each key and value once, however many query heads share it (`shared_heads`).
transformers gives every query head its own copy of them where there is a mask, and a cache of fixed size always has
one. On an H100 these copies were half of a decoding step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offline_grpo.errors import reason_of

_not_recorded: WeakSet[Any] = WeakSet()
"""Models whose forward pass waits for the GPU, to look at a value."""

SDPA = "sdpa"

log = logging.getLogger(__name__)


def has_graphs(lm: Any) -> bool:
    """Whether decoding steps of this model can be recorded."""
    is_able = lm._can_compile_fullgraph
    is_able &= not getattr(lm.config, "alibi", False)  # Falcon with it says that it can, and breaks
    is_able &= not any(module._forward_pre_hooks for module in lm.modules())  # such as those of FSDP2
    return is_able and lm.device.type == "cuda" and lm not in _not_recorded


def with_fixed_size(filled: DynamicCache, lm: Any, max_length: int) -> Cache:
    """What is in `filled`, which is emptied, in tensors that never move and hold `max_length` tokens. `filled` itself
    where layers count in Python, which a recorded step would not do, such as those of sliding windows.
    """
    cache = StaticCache(config=lm.config.get_text_config(decoder=True), max_cache_len=max_length)
    if any(type(layer) is not StaticLayer for layer in cache.layers):
        return filled
    old: Any
    new: Any
    for old, new in zip(filled.layers, cache.layers, strict=False):  # before a prefill there are no old ones
        if old.is_initialized:
            new.update(old.keys, old.values)
            old.keys = old.values = None
    return cache


@contextmanager
def graphed_steps(lm: Any) -> Iterator[None]:
    """Inside, `lm.generate` with a cache of fixed size replays a graph for every step but the first two."""
    lm.get_compiled_call = lambda _: _StepGraph(lm)
    try:
        yield
    finally:
        del lm.get_compiled_call


@dataclass(eq=False)
class _StepGraph:
    """A forward pass for one token per row. The first call runs as usual, to load kernels; the second is recorded."""

    lm: Any
    is_warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        # The second call is recorded; later ones copy their inputs to where the graph reads them.
        if self.is_warm and self.graph is None and has_graphs(self.lm):
            self._record(inputs)
        if self.graph is None:
            self.is_warm = True
            return self.lm(**inputs)
        for own, given in zip(self.inputs, _tensors(inputs), strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs

    def _record(self, inputs: Mapping[str, Any]) -> None:
        graph, own = torch.cuda.CUDAGraph(), _copied(inputs)
        stream = torch.cuda.Stream(self.lm.device)  # torch's own one stays on the GPU of the process's first graph
        try:
            with torch.cuda.graph(graph, stream=stream):
                self.outputs = self.lm(**own)
        except RuntimeError as error:  # nothing has run yet
            if isinstance(error, torch.OutOfMemoryError):
                raise
            _not_recorded.add(self.lm)
            log.warning("%s decodes without CUDA graphs, slower: %s", type(self.lm).__name__, reason_of(error))
            return
        self.graph, self.inputs = graph, list(_tensors(own))


def _copied(value: Any) -> Any:
    """With tensors of its own; attention masks are in a dict by the kind of layer."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(inputs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in inputs.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


@contextmanager
def shared_heads() -> Iterator[None]:
    """Inside, transformers' models that use `scaled_dot_product_attention` decode without copies."""
    before = ALL_ATTENTION_FUNCTIONS[SDPA]
    # compiled blocks look whether there is more than these
    AttentionInterface.register(SDPA, functools.partial(_attention, before))
    try:
        yield
    finally:
        AttentionInterface.register(SDPA, before)


def _attention(
    otherwise: Callable[..., tuple[Tensor, Tensor | None]],
    module: Any,
    query: Tensor,  # [B, heads, L, D]
    key: Tensor,  # [B, kv_heads, S, D]
    value: Tensor,  # [B, kv_heads, S, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, L, heads, Dv], and no attention weights. What it does not fit is left to `otherwise`, of transformers."""
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    has_one_mask = attention_mask is None or attention_mask.shape[1:3] == (1, 1)
    is_plain = not any(others.get(name) for name in ("dropout", "cache")) and others.get("position_bias") is None
    if length > 1 or heads == kv_heads or not (has_one_mask and is_plain):
        return otherwise(module, query, key, value, attention_mask, scaling=scaling, **others)
    # the query heads of one key stand where several tokens would
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, size)
    # [B, kv_heads, groups, Dv]
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None
