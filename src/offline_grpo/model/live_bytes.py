"""Counts the memory of tensors, on any device: also on the meta device, where tensors have a size and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def allocated_bytes(num_bytes: int) -> int:
    """What torch's CUDA allocator gives to a tensor of `num_bytes`: the next multiple of 512."""
    return -(-num_bytes // 512) * 512


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operations inside make, until they are freed: `now`, and its maximum
    `peak`.
    """

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # transformers asks whether positions are consecutive; meta tensors cannot say
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
