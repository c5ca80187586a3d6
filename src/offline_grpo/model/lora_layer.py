"""LoRA layers that multiply their scale into B, which is small, and not into the adapter's output. vLLM does the same when it loads one."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

from offline_grpo.model.adapters import ADAPTER


class FoldedLinear(Linear):
    """peft's layer, without the two arrays [T, out] that peft scales, one in the forward and one in the backward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., out] for x [..., in]."""
        if self.disable_adapters or self.merged or self.active_adapters != [ADAPTER] or args or kwargs:
            return super().forward(x, *args, **kwargs)
        a: Any = self.lora_A[ADAPTER]
        b: Any = self.lora_B[ADAPTER]
        return self.base_layer(x) + linear(a(self.lora_dropout[ADAPTER](x)), b.weight * self.scaling[ADAPTER])


def fold_scales(model: nn.Module) -> int:
    """Let the adapted linear layers of a model do it so, in place; names and state stay as they are. Returns their number.

    Left as peft made them: layers of other kinds, or in another format than their adapter (a router in fp32), and adapters that have more
    than A and B.
    """
    layers = [module for module in model.modules() if type(module) is Linear and _is_plain(module)]
    for layer in layers:
        layer.__class__ = FoldedLinear  # it adds no state
    return len(layers)


def _is_plain(layer: Linear) -> bool:
    a: Any = layer.lora_A[ADAPTER]
    base: Any = layer.get_base_layer()
    return base.weight.dtype == a.weight.dtype and not layer.lora_variant and not layer.lora_bias[ADAPTER]
