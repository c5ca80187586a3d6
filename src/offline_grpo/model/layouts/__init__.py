"""The layouts of `model.layout`, each an `interfaces.Layout`, and the choice that `auto` makes."""

from __future__ import annotations

import torch

from offline_grpo.errors import require
from offline_grpo.interfaces import Layout
from offline_grpo.model.layouts.rows import Padded, Tree
from offline_grpo.model.layouts.varlen import Flash4, Varlen, has_flash4, has_varlen_kernel

LAYOUTS: dict[str, type[Layout]] = {"padded": Padded, "tree": Tree, "varlen": Varlen, "flash4": Flash4}


def layout_named(name: str) -> Layout | None:
    """The layout that `model.layout=NAME` asks for; None for `auto` (see `layouts_for`)."""
    if name == "auto":
        return None
    names = ", ".join(("auto", *LAYOUTS))
    fix = f"must be one of {names}; a layout of your own is chosen by model/layout={name}"
    require(name in LAYOUTS, "model.layout", name, fix)
    return LAYOUTS[name]()


def layouts_for(layout: Layout | None, device: torch.device, dtype: torch.dtype) -> list[Layout]:
    """`layout`; where it is None (`auto`), those that run on `device` in `dtype`, the fastest first and padded rows
    last. Raises ConfigError where `layout` does not run there.
    """
    if layout is not None:
        layout.check(device, dtype)
        return [layout]
    found: list[Layout] = [Flash4()] if has_flash4(device, dtype) else []
    if has_varlen_kernel(device, dtype):
        found.append(Varlen())
    elif device.type == "cpu":  # building trees reads token ids, which on a GPU would wait for it
        found.append(Tree())
    return [*found, Padded()]
