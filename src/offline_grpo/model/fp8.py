"""What FP8 does to a model's logprobs: inside `fp8_linears`, its linear layers compute as those of a server that
quantises weights and activations to e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from offline_grpo.model.layers import blocks_of, not_compiled

E4M3_MAX = 448.0


@contextmanager
def fp8_linears(model: Any) -> Iterator[None]:
    """For passes without gradients. Nothing is written: each product rounds its factors, one weight at a time.

    Adapters, embeddings and the output head are not rounded, as in vLLM; nor are experts, which use no `linear`.
    """
    layers = [(name, m) for name, m in blocks_of(model).named_modules() if isinstance(m, nn.Linear)]
    with not_compiled(model), _Rounding({m.weight.shape for name, m in layers if ".lora_" not in name}):
        yield


class _Rounding(TorchFunctionMode):
    """Knows weights by their shapes: sharded ones are other tensors during a pass."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and args[1].shape in self._shapes:
            args = (e4m3(args[0]), e4m3(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def e4m3(x: Tensor) -> Tensor:
    """`x` rounded to e4m3 (3 bits of mantissa: by up to 1/16 of each number), with a scale for each row. Servers with
    one scale for a whole weight round otherwise, and as far.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
