"""The K most probable of V tokens, sooner than by `torch.topk`, whose time is a third of a step of a small model.

vLLM looks for them in each step that has requests with logprobs of several tokens, such as those that ask what top-p
left. Like its neighbours, the module stands alone.
"""

from __future__ import annotations

import importlib
import types
from math import log2
from typing import Any

import torch
from torch import Tensor

SAMPLERS = ("vllm.v1.sample.sampler", "vllm.v1.worker.gpu.sample.logprob")
"""vLLM's modules that call `torch.topk` for it: of its model runners 1 and 2."""
WORTH = 4  # of tokens that are looked at twice, at most every fourth


def topk(values: Tensor, k: int, dim: int = -1) -> Any:
    """`torch.topk` of rows [R, V]. The k largest lie in the k blocks whose largest ones are the largest, so that two
    short searches find them: among the largest of the blocks, and in k blocks.
    """
    num_values = values.shape[-1]
    size = 2 ** max(3, round(log2(max(num_values / max(k, 1), 1)) / 2))  # of a block
    num_blocks = num_values // size
    if values.dim() != 2 or dim not in (-1, 1) or WORTH * (num_blocks + k * size) > num_values:
        return torch.topk(values, k, dim=dim)
    whole = num_blocks * size  # what is behind is looked at anyway
    largest = values[:, :whole].unflatten(1, (num_blocks, size)).amax(2)  # [R, V / size]
    blocks = torch.topk(largest, k, dim=1).indices  # [R, k]
    ids = (blocks[:, :, None] * size + torch.arange(size, device=values.device)).flatten(1)  # [R, k * size]
    rest = torch.arange(whole, num_values, device=values.device).expand(len(values), -1)
    ids = torch.cat([ids, rest], 1)
    found = torch.topk(values.gather(1, ids), k, dim=1)
    return torch.return_types.topk((found.values, ids.gather(1, found.indices)))


class _Torch(types.ModuleType):
    """torch, with our `topk`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def use_in_samplers() -> None:
    """Let vLLM's samplers find the most probable tokens so, in this process."""
    ours: Any = _Torch("torch")
    ours.topk = topk
    for name in SAMPLERS:
        module: Any = importlib.import_module(name)
        module.torch = ours
