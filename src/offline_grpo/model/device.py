"""The device that a model computes on."""

from __future__ import annotations

import re

import torch

from offline_grpo.errors import require


def resolve_device(device: str, local_rank: int = 0, *, key: str = "model.device") -> torch.device:
    """The device that `key` names; `auto` is this process's GPU if there is one, else the CPU.

    Raises:
        ConfigError: no such device on this machine, or one that is neither CPU nor GPU.
    """
    if device == "auto":
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    require(re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None, key, device, "use auto, cpu, cuda or cuda:N")
    resolved = torch.device(device)
    if resolved.type == "cuda":
        count = torch.cuda.device_count()
        fix = f"this machine has {count} CUDA devices, numbered from 0; {key}=cpu uses none"
        require((resolved.index or 0) < count, key, device, fix)
    return resolved


def make_current(device: torch.device) -> None:
    """Make this GPU torch's current one, which CUDA graphs and Triton kernels run on wherever their tensors are.
    Nothing for a CPU.
    """
    if device.index is not None:
        torch.cuda.set_device(device)
