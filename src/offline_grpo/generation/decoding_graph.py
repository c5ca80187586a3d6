"""Decoding on a GPU as a CUDA graph: the kernels of a step are launched together, not one after the other by Python.

For a cache of fixed size transformers' `generate` would compile the model, which takes minutes; a graph of the same
pass takes a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from offline_grpo.errors import reason_of

_not_recorded: WeakSet[Any] = WeakSet()
"""Models whose forward pass waits for the GPU, to look at a value."""

log = logging.getLogger(__name__)


def has_graphs(lm: Any) -> bool:
    """Whether decoding steps of this model can be recorded, by what transformers says of it. Falcon with ALiBi says so,
    and breaks.

    Not with hooks, such as those of FSDP2.
    """
    is_able = lm._can_compile_fullgraph and not getattr(lm.config, "alibi", False)
    is_able &= not any(module._forward_pre_hooks for module in lm.modules())
    return is_able and lm.device.type == "cuda" and lm not in _not_recorded


def with_fixed_size(filled: DynamicCache, lm: Any, max_length: int) -> Cache:
    """What is in `filled`, which is emptied, in tensors that never move and hold `max_length` tokens.

    `filled` itself for layers that count in Python, which a recorded step would not do, such as those of sliding
    windows.
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


class _StepGraph:
    """A forward pass for one token per row. The first call runs as usual, which loads kernels; the second is recorded
    and replayed.
    """

    def __init__(self, lm: Any) -> None:
        self._lm = lm
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        if self._is_warm and self._graph is None and has_graphs(self._lm):
            self._record(inputs)
        if self._graph is None:
            self._is_warm = True
            return self._lm(**inputs)
        for own, given in zip(self._inputs, _tensors(inputs), strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._outputs

    def _record(self, inputs: Mapping[str, Any]) -> None:
        graph, own = torch.cuda.CUDAGraph(), _copied(inputs)
        stream = torch.cuda.Stream(self._lm.device)  # torch's own one stays on the GPU of the process's first graph
        try:
            with torch.cuda.graph(graph, stream=stream):
                self._outputs = self._lm(**own)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # nothing has run yet
            _not_recorded.add(self._lm)
            log.warning("%s decodes without CUDA graphs, slower: %s", type(self._lm).__name__, reason_of(error))
            return
        self._graph, self._inputs = graph, list(_tensors(own))


def _copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """With tensors of its own; attention masks are in a dict by the kind of layer."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return _copied(value)
        return value.clone() if isinstance(value, Tensor) else value

    return {name: copy(value) for name, value in inputs.items()}


def _tensors(inputs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in inputs.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value
