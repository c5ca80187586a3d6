"""The layouts of `model.layout`, and the choice that `auto` makes. A layout is a class that implements `interfaces.Layout`."""

from __future__ import annotations

import torch

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Layout
from offline_grpo.model.layouts.padded import Padded
from offline_grpo.model.layouts.tree import Tree
from offline_grpo.model.layouts.varlen import Varlen, has_varlen_kernel

LAYOUTS: dict[str, type[Layout]] = {"padded": Padded, "tree": Tree, "varlen": Varlen}


def layout_named(name: str) -> Layout | None:
    """The layout that `model.layout=NAME` asks for; None for `auto` (see `choose_layout`).

    Raises:
        ConfigError: no layout has that name.
    """
    if name == "auto":
        return None
    if name not in LAYOUTS:
        names = ", ".join(("auto", *LAYOUTS))
        raise ConfigError(f"model.layout={name}: must be one of {names}; a layout of your own is chosen by model/layout={name}")
    return LAYOUTS[name]()


def choose_layout(layout: Layout | None, device: torch.device, dtype: torch.dtype) -> Layout:
    """`layout`; where it is None (`auto`), varlen if its kernel runs on `device` in `dtype`, tree on the CPU, padded elsewhere.

    Raises:
        ConfigError: `layout` does not run there.
    """
    if layout is not None:
        layout.check(device, dtype)
        return layout
    if has_varlen_kernel(device, dtype):
        return Varlen()
    return Tree() if device.type == "cpu" else Padded()  # building trees reads token ids, which on a GPU would wait for it
