"""LoRA layers that multiply their scale into B, which is small, and not into the adapter's output. vLLM does the same when it loads one."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

from offline_grpo.model.adapters import ADAPTER


class FoldedLinear(Linear):
    """peft's layer with fewer and smaller kernels: it scales an array [T, out] in the forward pass, and one in the backward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., out] for x [..., in]."""
        if self.disable_adapters or self.merged or args or kwargs:
            return super().forward(x, *args, **kwargs)
        a: Any = self.lora_A[ADAPTER]
        b: Any = self.lora_B[ADAPTER]
        return self.base_layer(x) + linear(a(self.lora_dropout[ADAPTER](x)), b.weight * self.scaling[ADAPTER])


def fold_scales(model: nn.Module) -> int:
    """Let the adapted linear layers of a model do it so, in place; names and state stay as they are. Returns their number.

    Layers of other kinds, and adapters with more than A and B, are left as peft made them.
    """
    layers = [module for module in model.modules() if type(module) is Linear and not module.lora_variant and not module.lora_bias[ADAPTER]]
    for layer in layers:
        layer.__class__ = FoldedLinear  # it adds no state
    return len(layers)
