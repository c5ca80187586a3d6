"""A group of trainer and workers, over which weights are broadcast a bucket at a time: both sides of it."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

c10d: Any = distributed  # whose stubs lack some of it
Described = Sequence[Any]
"""Name, dtype and shape of a tensor."""
ALIGNED_BYTES = 16


def meet(address: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    """A process group over NCCL, apart from those that trainer and server have; over gloo on CPUs, where tests form it.
    Returns when all ranks have come.

    Args:
        address: of rank 0, which alone listens there.
    """
    listener = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family).detach()
    store = c10d.TCPStore(address, port, world_size, rank == 0, wait_for_workers=False, master_listen_fd=listener)
    if device.type == "cpu":
        return c10d.ProcessGroupGloo(store, rank, world_size, timedelta(minutes=1))
    with torch.cuda.device(device):
        group = c10d.ProcessGroupNCCL(store, rank, world_size, c10d.ProcessGroupNCCL.Options())
        group.broadcast(torch.zeros(1, device=device), 0).wait()
        torch.cuda.synchronize(device)
    return group


def empty_bucket(described: Sequence[Described], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory for several tensors, and the tensors in it."""
    dtypes = [getattr(torch, dtype) for _, dtype, _ in described]
    sizes = [math.prod(shape) * dtype.itemsize for (_, _, shape), dtype in zip(described, dtypes, strict=True)]
    areas = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    flat = torch.empty(sum(areas), dtype=torch.uint8, device=device)
    tensors = [
        area[:size].view(dtype).view(shape)
        for area, size, dtype, (_, _, shape) in zip(flat.split(areas), sizes, dtypes, described, strict=True)
    ]
    return flat, tensors
