"""`train.activation_offload`: the inputs of recomputed blocks wait for the backward pass in the host's memory.

forward     an input is copied out while its block computes
backward    an input comes back while the block behind it is computed again
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

FLIGHT = 3
"""Inputs on the GPU at once, at most: of the block that computes, and of those that are copied out or back."""


def host_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of so many numbers, not initialised, in the host's memory.

    Where `device` is a GPU, the pages are locked until the last view is gone, so that copies run beside computations.
    torch's own page-locked tensors are not used: their memory is the next power of two. Raises torch.OutOfMemoryError
    if the host has too little memory that it may lock.
    """
    memory = np.empty(count * dtype.itemsize, dtype=np.uint8)  # of numpy, which says when it goes
    if device.type == "cuda" and len(memory):
        # They are unlocked before the memory goes: what the next job of a sweep gets may lie at the same place, and
        # cannot be locked twice. The end of the process needs no help.
        runtime: Any = torch.cuda.cudart()
        address = memory.ctypes.data
        code = int(runtime.cudaHostRegister(address, memory.nbytes, 1))  # 1: for all GPUs
        if code != 0:
            gib = memory.nbytes / 2**30
            says = f"the host cannot lock {gib:.1f} GiB of its memory (error {code}); `ulimit -l`"
            raise torch.OutOfMemoryError(says)
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory).view(dtype)


def offload_inputs(model: nn.Module) -> None:
    """Let the inputs of blocks that transformers recomputes wait in the host's memory."""
    waiting = WaitingInputs()
    module: Any
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = partial(waiting.checkpoint, use_reentrant=False)


class WaitingInputs:
    """The inputs of a model's blocks between forward and backward pass. Locking memory is slow, so it is kept."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # memory of the host that no input is in
        self._stream: torch.cuda.Stream | None = None  # that copies in both directions, one after the other
        self._newest: Callable[[], Input | None] = lambda: None

    def checkpoint(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """torch's, which saves the tensors among `args`, and computes the rest again."""
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(function, *args, **how)

    def _pack(self, tensor: Tensor) -> Tensor | Input:
        if tensor.dim() != 3 or not tensor.is_floating_point():  # no hidden states: a mask, which all blocks share
            return tensor
        packed = Input(tensor, self._memory(tensor), self._newest)
        self._newest = weakref.ref(packed)
        weakref.finalize(packed, self._free.append, packed.memory).atexit = False
        with self._beside(tensor.device) as stream:
            packed.host.copy_(tensor, non_blocking=True)
        if stream is not None:
            tensor.record_stream(stream)
        return packed

    def _unpack(self, packed: Tensor | Input) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        tensor, packed.fetched = packed.fetched, None
        assert tensor is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        if (before := packed.before()) is not None:  # needed next
            self._fetch(before)
        return tensor

    def _fetch(self, packed: Input) -> None:
        if packed.fetched is None:
            with self._beside(packed.device):
                packed.fetched = torch.empty_like(packed.host, device=packed.device)
                packed.fetched.copy_(packed.host, non_blocking=True)

    def _memory(self, tensor: Tensor) -> Tensor:
        """The least free memory that has room for it, or new one, for which one that is too small goes."""
        if rooms := [room for room in self._free if room.nbytes >= tensor.nbytes]:
            room = min(rooms, key=lambda room: room.nbytes)
            del self._free[next(i for i, other in enumerate(self._free) if other is room)]
            return room
        if self._free and self._stream is not None:
            self._stream.synchronize()  # what was copied from there has arrived
        del self._free[:1]
        return host_memory(tensor.nbytes, torch.uint8, tensor.device)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
        """Inside, a GPU copies beside what it computes, but after what it has been told to compute so far."""
        if device.type != "cuda":
            yield None
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield self._stream


class Input:
    """Of a block: hidden states, as torch keeps them for the backward pass."""

    def __init__(self, tensor: Tensor, memory: Tensor, before: Callable[[], Input | None]) -> None:
        self.device, self.memory = tensor.device, memory
        self.host = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.before = before  # the one before it, if that still waits
        self.fetched: Tensor | None = None  # back on the device
