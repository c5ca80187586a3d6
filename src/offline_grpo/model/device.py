"""The device that a model computes on."""

from __future__ import annotations

import torch

from offline_grpo.errors import ConfigError


def resolve_device(device: str, local_rank: int = 0, *, key: str = "model.device") -> torch.device:
    """The device that `key` names; `auto` is this process's GPU if there is one, else the CPU.

    Raises:
        ConfigError: no such device on this machine, or one that is neither CPU nor GPU.
    """
    if device == "auto":
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{key}={device}: no device of that name; use auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"{key}={device}: models run on CPUs and CUDA devices only; use auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda":
        count = torch.cuda.device_count()
        if (resolved.index or 0) >= count:
            has = (
                f"this machine has {count} CUDA device{'s' if count != 1 else ''}"
                if count
                else "this machine has no CUDA device"
            )
            raise ConfigError(
                f"{key}={device}: {has}; use {'cuda:0 to cuda:' + str(count - 1) if count else key + '=cpu'}"
            )
    return resolved


def make_current(device: torch.device) -> None:
    """Make this GPU torch's current one, which CUDA graphs and Triton kernels run on wherever their tensors are.
    Nothing for a CPU.
    """
    if device.index is not None:
        torch.cuda.set_device(device)
