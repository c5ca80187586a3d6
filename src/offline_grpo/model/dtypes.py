"""The names of number formats. Importing this module does not import torch: composing a configuration needs the names
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
