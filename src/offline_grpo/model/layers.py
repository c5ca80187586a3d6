"""The transformer blocks of a model, whatever an architecture calls them (`model.layers.3`, `transformer.h.3`, ...)."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from offline_grpo.errors import ConfigError, require


def num_blocks(model: Any) -> int:
    """How many transformer blocks config.json names."""
    return model.config.get_text_config().num_hidden_layers


def named_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """The name and the list of the transformer blocks: the outermost ModuleList of their number. Raises ConfigError."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks(model):
            return name, module
    has_none = f"found no list of {num_blocks(model)} blocks in {type(model).__name__}"
    raise ConfigError(f"{has_none}: blocks cannot be chosen by index")


def blocks_of(model: Any) -> nn.ModuleList:
    """The transformer blocks. Raises ConfigError where no list of them is found."""
    return named_blocks(model)[1]


def parse_layer_indices(text: str, model: Any, *, key: str) -> list[int]:
    """`"0-3,28-31"` -> [0, 1, 2, 3, 28, 29, 30, 31].

    Raises:
        ConfigError: not of that form, or an index of a block that the model has not.
    """
    count = num_blocks(model)
    indices: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, -1)
        require(first <= last, key, text, "write indices and ranges, for example 20-31 or 0-3,28-31")
        require(last < count, key, text, f"the model has {count} blocks, 0-{count - 1}")
        indices.update(range(first, last + 1))
    return sorted(indices)
