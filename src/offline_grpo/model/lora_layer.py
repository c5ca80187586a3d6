"""LoRA layers that multiply their scale into B, which is small, and not into the adapter's output. vLLM does the same when it loads one."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

from offline_grpo.model.adapters import ADAPTER


class FoldedLinear(Linear):
    """peft's layer, without the two arrays [T, out] that peft scales, one in the forward and one in the backward pass."""

    folded: tuple[nn.Linear, nn.Linear, nn.Linear, nn.Module | None, float]
    """Base layer, A, B, dropout if there is any, and scale. Compiled blocks check all that they look up each time they run, which takes
    longer where it lies in peft's dictionaries."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., out] for x [..., in]."""
        if self._disable_adapters or self.merged_adapters or args or kwargs:
            return super().forward(x, *args, **kwargs)
        base, a, b, dropout, scale = self.folded
        inner = linear(x if dropout is None else dropout(x), a.weight)  # [..., R]
        return linear(x, base.weight, base.bias) + linear(inner, b.weight * scale)


def fold_scales(model: nn.Module) -> int:
    """Let the adapted linear layers of a model do it so, in place; names and state stay as they are. Returns their number.

    Left as peft made them: layers of other kinds, with hooks, or in another format than their adapter (a router in fp32), layers with
    several adapters, and adapters that have more than A and B.
    """
    layers = [module for module in model.modules() if type(module) is Linear and _is_plain(module)]
    for layer in layers:
        layer.__class__ = FoldedLinear
        dropout: Any = layer.lora_dropout[ADAPTER]
        used = None if isinstance(dropout, nn.Identity) else dropout
        folded: Any = (layer.get_base_layer(), layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], used, layer.scaling[ADAPTER])
        layer.folded = folded
    return len(layers)


def _is_plain(layer: Linear) -> bool:
    a: Any = layer.lora_A[ADAPTER]
    base: Any = layer.get_base_layer()
    has_own_forward = type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks
    has_more = len(layer.lora_A) > 1 or layer.lora_variant or layer.lora_bias[ADAPTER]
    return base.weight.dtype == a.weight.dtype and not has_own_forward and not has_more
