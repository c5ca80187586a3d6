"""LoRA layers faster than peft's: the scale is multiplied into B, and layers of the same input multiply it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear


class Folded(nn.Module):
    """peft's layer, without the two arrays [T, out] that it scales. vLLM folds the scale in the same way. The classes
    below put it in front of peft's own, one for each kind of base layer.
    """

    folded: tuple[nn.Linear, nn.Linear, nn.Linear, nn.Module | None, float]
    """Base layer, A, B, dropout if there is any, and scale. Compiled blocks check all that they look up each time they
    run, which takes longer where it lies in peft's dictionaries."""
    shared: SharedInput | None = None
    place: int = 0
    """Among the layers of `shared`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., out] for x [..., in]."""
        layer: Any = self
        if layer._disable_adapters or layer.merged_adapters or args or kwargs:
            return super().forward(x, *args, **kwargs)
        base, a, b, dropout, scale = self.folded
        shared = self.shared
        own = x if dropout is None else dropout(x)
        inner = linear(own, a.weight) if shared is None else shared(x, self.place)  # [..., R]
        return self.product(base, x) + linear(inner, b.weight * scale)

    def product(self, base: nn.Linear, x: Tensor) -> Tensor:
        """Of the base layer and x [..., in]: [..., out]."""
        return linear(x, base.weight, base.bias)


class FoldedLinear(Folded, Linear):
    """On weights that are not quantised."""


KINDS: dict[type, type[Folded]] = {Linear: FoldedLinear}
with suppress(ImportError):  # peft has it where bitsandbytes is installed
    from peft.tuners.lora.bnb import Linear4bit

    class Folded4bit(Folded, Linear4bit):
        """On weights in 4 bits."""

        def product(self, base: nn.Linear, x: Tensor) -> Tensor:
            return base(x)

    KINDS[Linear4bit] = Folded4bit


@dataclass(eq=False)
class SharedInput:
    """One input times the A of several layers, such as q, k and v: the first makes it, and each takes its part."""

    layers: Sequence[Folded]
    x: Tensor | None = None
    parts: Sequence[Tensor] = ()

    def __call__(self, x: Tensor, place: int) -> Tensor:
        """[..., R] for x [..., in], of the layer at `place`."""
        if place == 0:
            matrices = [layer.folded[1].weight for layer in self.layers]
            self.x, self.parts = x, linear(x, torch.cat(matrices)).split([len(matrix) for matrix in matrices], -1)
        elif x is not self.x:  # not called as they were when this was found out
            return linear(x, self.layers[place].folded[1].weight)
        part = self.parts[place]
        if place == len(self.layers) - 1:
            self.x, self.parts = None, ()
        return part


def fold_scales(model: nn.Module, adapter: str) -> int:
    """Let the adapted linear layers of a model do it so, in place; names and state stay. Returns their number.

    Left as peft made them: layers of other kinds, with hooks, or in another format than their adapter (a router in
    fp32), layers with several adapters, and adapters that have more than A and B.
    """
    num_folded = 0
    layers: list[Any] = [module for module in model.modules() if type(module) in KINDS]
    for layer in layers:
        # Whether it is plain: y = base(x) + scale B A x, all in one format, and nothing that hooks or other parts add.
        kind: type = type(layer)
        base, a = layer.get_base_layer(), layer.lora_A[adapter]
        has_own_forward = type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks
        is_other = kind is Linear and (has_own_forward or base.weight.dtype != a.weight.dtype)
        if is_other or len(layer.lora_A) > 1 or layer.lora_variant or layer.lora_bias[adapter]:
            continue
        num_folded += 1
        layer.__class__ = KINDS[kind]
        dropout: Any = layer.lora_dropout[adapter]
        used = None if isinstance(dropout, nn.Identity) else dropout
        folded: Any = (base, a, layer.lora_B[adapter], used, layer.scaling[adapter])
        layer.folded = folded
    return num_folded


def share_inputs(model: nn.Module, run: Callable[[], object]) -> int:
    """Let adapted layers that read the same input, one right after the other, multiply it by all of their A at once.
    Returns the number of such groups. Layers with dropout are left out: each draws a mask of its own.

    `run` passes something through the model, which shows who shares an input; names say so for some models only.
    """
    # Which layers are called with which input, in which order.
    layers = [module for module in model.modules() if isinstance(module, Folded) and module.folded[3] is None]
    calls: list[tuple[Any, object]] = []  # the inputs are kept until the end, so that no two have the same id

    def see(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls.append((layer, inputs[0] if inputs else layer))

    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()

    # Those called one after the other with the same input are a group, unless one of them was in another group too.
    seen: dict[Folded, set[tuple[Folded, ...]]] = {layer: set() for layer in layers}
    for _, together in groupby(calls, key=lambda call: id(call[1])):
        group = tuple(layer for layer, _ in together)
        for layer in group:
            seen[layer].add(group)
            layer.shared = None
    groups = {
        group
        for found in seen.values()
        for group in found
        if len(group) > 1 and all(seen[layer] == {group} for layer in group)
    }
    for group in groups:
        shared = SharedInput(group)
        for place, layer in enumerate(group):
            layer.shared, layer.place = shared, place
    return len(groups)
