"""Other ways to add a LoRA adapter's product to its layer's output, to compare with ours and peft's (lora_speed.py times them).

peft multiplies the adapter's output by the scale, then adds it to that of the layer. Forward and backward pass both read and write an array
of the layer's size more often than they need to: that takes longer than the adapter's small products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

from offline_grpo.model.adapters import ADAPTER
from offline_grpo.model.lora_layer import FoldedLinear


class SharedInput(FoldedLinear):
    """Ours, and layers that read the same input, such as q, k and v, multiply it by all of their A at once."""

    shared: Shared | None = None
    place = 0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.shared is None:
            return super().forward(x, *args, **kwargs)
        _, b, scale = parts(self)
        return self.base_layer(x) + linear(self.shared(x, self.place), b * scale)


class Shared:
    """The product of one input with the A of several layers, each of which takes its part once."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers, self.num_left = layers, 0
        self.x: Tensor | None = None
        self.found: Sequence[Tensor] = ()

    def __call__(self, x: Tensor, place: int) -> Tensor:
        if x is not self.x:
            matrices = [parts(layer)[0] for layer in self.layers]
            self.x, self.num_left = x, len(self.layers)
            self.found = linear(x, torch.cat(matrices)).split([len(matrix) for matrix in matrices], -1)
        found = self.found[place]
        self.num_left -= 1
        if self.num_left == 0:
            self.x, self.found = None, ()
        return found


def share_inputs(model: nn.Module) -> None:
    """Let the layers of each block that read the same input do so together."""
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            layers = [getattr(module, name, None) for name in names]
            if all(isinstance(layer, SharedInput) for layer in layers):
                shared = Shared(layers)  # type: ignore[arg-type]
                for place, layer in enumerate(layers):
                    layer.shared, layer.place = shared, place  # type: ignore[union-attr]


class InPlace(Linear):
    """The matrix product itself adds to the layer's output, and in the backward pass to the gradient of its input."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        a, b, scale = parts(self)
        base: Any = self.base_layer
        return adapted(x, base.weight, base.bias, a, b, scale)[0]


def parts(layer: Linear) -> tuple[Tensor, Tensor, float]:
    """A [R, in], B [out, R], and the scale of their product."""
    a: Any = layer.lora_A[ADAPTER]
    b: Any = layer.lora_B[ADAPTER]
    return a.weight, b.weight, layer.scaling[ADAPTER]


def add_as(way: type[Linear], model: nn.Module) -> int:
    """Let all of a model's adapted linear layers do it in this way. Returns their number. Dropout and the like are not for a benchmark."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        assert type(layer.base_layer) is nn.Linear, layer
        assert isinstance(layer.lora_dropout[ADAPTER], nn.Identity), layer
        layer.__class__ = way
    if way is SharedInput:
        share_inputs(model)
    return len(layers)


@torch.library.custom_op("offline_grpo::lora_linear", mutates_args=())
def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The layer's output [..., out] for x [..., in], and x A^T [..., R] for the backward pass."""
    inner, out = linear(x, a), linear(x, weight, bias)
    out.flatten(0, -2).addmm_(inner.flatten(0, -2), b.T, alpha=scale)
    return out, inner


@adapted.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(*x.shape[:-1], a.shape[0])


@torch.library.custom_op("offline_grpo::lora_linear_backward", mutates_args=())
def gradients(grad: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, inner: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Those of x, A and B; the layer itself is frozen."""
    grad, rows = grad.flatten(0, -2), x.flatten(0, -2)
    inner_grad = (grad @ b).mul_(scale)  # [T, R]
    x_grad = grad @ weight
    x_grad.addmm_(inner_grad, a)
    return x_grad.view_as(x), inner_grad.T @ rows, (grad.T @ inner.flatten(0, -2)).mul_(scale)


@gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(a), torch.empty_like(b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, a, b, ctx.scale = inputs
    ctx.save_for_backward(x, weight, a, b, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x_grad, a_grad, b_grad = gradients(grad, *ctx.saved_tensors, ctx.scale)
    return x_grad, None, None, a_grad, b_grad, None


adapted.register_autograd(_backward, setup_context=_save)
