"""Devices and number formats by the names that settings give them. Importing this module does not import torch:
composing a configuration needs the names alone.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from offline_grpo.errors import require

if TYPE_CHECKING:
    import torch

TORCH_NAMES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}
"""torch's name of a format that `train.precision` (fp32, bf16, fp16) or a server's `dtype` names."""


def torch_dtype(name: str) -> torch.dtype:
    """The format that `train.precision`, torch or a server calls `name`; KeyError for any other name."""
    import torch

    return getattr(torch, TORCH_NAMES[name])


def resolve_device(device: str, local_rank: int = 0, *, key: str = "model.device") -> torch.device:
    """The device that `key` names; `auto` is this process's GPU if there is one, else the CPU. Raises ConfigError."""
    import torch

    if device == "auto":
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    require(re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None, key, device, "use auto, cpu, cuda or cuda:N")
    resolved = torch.device(device)
    if resolved.type == "cuda":
        count = torch.cuda.device_count()
        fix = f"this machine has {count} CUDA devices, numbered from 0; {key}=cpu uses none"
        require((resolved.index or 0) < count, key, device, fix)
    return resolved


def be_deterministic() -> None:
    """Let torch compute the same numbers from the same inputs on the same GPU, by slower kernels where it has faster
    ones; before the GPU is used. Where it has none, it raises RuntimeError later.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    of_torch: Any = torch.utils.deterministic
    of_torch.fill_uninitialized_memory = False  # with NaN, to find faults


def make_current(device: torch.device) -> None:
    """Make a GPU torch's current one, which CUDA graphs and Triton kernels run on wherever their tensors are."""
    import torch

    if device.index is not None:
        torch.cuda.set_device(device)
