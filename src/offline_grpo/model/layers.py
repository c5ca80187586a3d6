"""Choosing transformer blocks by index, for any architecture's names (`model.layers.3`, `transformer.h.3`, ...)."""

from __future__ import annotations

import re

from torch import nn

from offline_grpo.errors import ConfigError, require


def parse_layer_indices(text: str, num_layers: int, *, key: str) -> list[int]:
    """`"0-3,28-31"` -> [0, 1, 2, 3, 28, 29, 30, 31].

    Raises:
        ConfigError: not of that form, or an index of a block that the model has not.
    """
    indices: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, -1)
        require(first <= last, key, text, "write indices and ranges, for example 20-31 or 0-3,28-31")
        require(last < num_layers, key, text, f"the model has {num_layers} blocks, 0-{num_layers - 1}")
        indices.update(range(first, last + 1))
    return sorted(indices)


def blocks_of(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The name and the list of the model's transformer blocks: its outermost ModuleList with `num_layers` entries."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise ConfigError(
        f"found no list of {num_layers} blocks in {type(model).__name__}: blocks cannot be chosen by index"
    )


def train_only_blocks(model: nn.Module, indices: list[int], num_layers: int) -> None:
    """Freeze everything but these blocks; embeddings, final norm and head included."""
    _, blocks = blocks_of(model, num_layers)
    trained = {id(p) for index in indices for p in blocks[index].parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def recompute_only(model: nn.Module, share: float, num_layers: int) -> None:
    """Of a model with gradient checkpointing, recompute this share of the blocks alone, spread evenly; all, if it has
    no list of them.
    """
    try:
        blocks = blocks_of(model, num_layers)[1]
    except ConfigError:
        return
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = int((number + 1) * share) > int(number * share)  # type: ignore[assignment]
