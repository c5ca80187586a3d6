"""fp32 tensors in the host's memory, end to end in one piece of it, for what a GPU has no room for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNED = 128
"""Elements: every tensor begins at a multiple, so that kernels read it as fast as one with memory of its own."""


class HostTensors:
    """`flat` [N] fp32, zeros, and a view of it for each shape: `views`. With the same shapes, the views have the same
    places.

    For a GPU its pages are locked until the last view is gone, so that copies run beside computations. torch's own
    page-locked tensors are not used: their memory is the next power of two.

    Args:
        device: the GPU that will read and write it, or the CPU.

    Raises:
        torch.OutOfMemoryError: the host has too little memory that it may lock.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        ends = list(accumulate(-(-shape.numel() // ALIGNED) * ALIGNED for shape in shapes.values()))
        starts = [0, *ends][: len(ends)]
        memory = np.empty(ends[-1] if ends else 0, dtype=np.float32)  # of numpy, which says when it goes
        self.flat = torch.from_numpy(memory).fill_(0)  # by all threads, unlike torch.zeros
        self.views: dict[str, Tensor] = {
            name: self.flat[start : start + shape.numel()].view(shape)
            for (name, shape), start in zip(shapes.items(), starts, strict=True)
        }
        if device.type == "cuda" and len(memory):
            _lock_pages(memory)


def _lock_pages(memory: np.ndarray) -> None:
    runtime: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 1))  # 1: for all GPUs
    if code != 0:
        raise torch.OutOfMemoryError(
            f"the host cannot lock {memory.nbytes / 2**30:.1f} GiB of its memory (error {code}); see `ulimit -l`"
        )
    # Before the memory goes: what the next job of a sweep gets may lie at the same place, and cannot be locked twice.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False  # the end of the process needs no help
