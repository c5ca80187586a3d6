"""`model.mlp_tile_tokens`: of more tokens than that, a block's MLP computes tiles, and each tile again in the backward
pass, so that nothing that is as wide as the MLP is there for all tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offline_grpo.errors import require

KEY = "model.mlp_tile_tokens"
NAMES = ("mlp", "feed_forward")
"""What blocks call a part that computes each token for itself."""


class Tiles:
    """The forward of an MLP."""

    def __init__(self, forward: Callable[[Tensor], Tensor], num_tokens: int) -> None:
        self.forward, self.num_tokens = forward, num_tokens
        self.of_tile = forward  # or compiled
        self._in_tiles: Any = torch.compiler.disable(self._each)  # a graph would be of one number of tiles

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., H] of hidden states [..., H]."""
        if hidden.numel() <= self.num_tokens * hidden.shape[-1]:
            return self.forward(hidden)
        return self._in_tiles(hidden)

    def _each(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)  # [T, H]
        tiles = rows.tensor_split(-(-len(rows) // self.num_tokens))  # of nearly the same size
        if torch.is_grad_enabled():
            found: Any = [checkpoint(self.of_tile, tile, use_reentrant=False) for tile in tiles]
        else:
            found = [self.of_tile(tile) for tile in tiles]
        return torch.cat(found).view_as(hidden)


def tile_mlps(blocks: nn.ModuleList, num_tokens: int) -> None:
    """Let the MLPs of these blocks compute at most so many tokens at once; experts choose their tokens and stay as they
    are. Raises ConfigError where no block has such an MLP.
    """
    found = [
        mlp
        for block in blocks
        for mlp in (getattr(block, name, None) for name in NAMES)
        if isinstance(mlp, nn.Module)
        and len(inspect.signature(mlp.forward).parameters) == 1
        and not any("expert" in name for name, _ in mlp.named_modules())
    ]
    fix = f"found no MLP in {type(blocks[0]).__name__} that computes each token for itself; use null"
    require(bool(found), KEY, num_tokens, fix)
    for mlp in found:
        mlp.forward = Tiles(mlp.forward, num_tokens)


def tiles_of(model: nn.Module) -> list[Tiles]:
    """Those of a model's MLPs."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, Tiles)]
