"""Attention of a single new token per row that reads each key and value once, however many query heads share it.

transformers gives every query head its own copy of them where there is a mask, and a cache of fixed size always has
one. On an H100 these copies were half of a decoding step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "sdpa"


@contextmanager
def shared_heads() -> Iterator[None]:
    """Inside, transformers' models that use `scaled_dot_product_attention` decode without copies."""
    before = ALL_ATTENTION_FUNCTIONS[SDPA]
    # compiled blocks look whether there is more than these
    AttentionInterface.register(SDPA, functools.partial(_attention, before))
    try:
        yield
    finally:
        AttentionInterface.register(SDPA, before)


def _attention(
    otherwise: Callable[..., tuple[Tensor, Tensor | None]],
    module: Any,
    query: Tensor,  # [B, heads, L, D]
    key: Tensor,  # [B, kv_heads, S, D]
    value: Tensor,  # [B, kv_heads, S, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, L, heads, Dv], and no attention weights. The query heads of one key stand where several tokens would.

    What that does not fit is left to `otherwise`, the function of transformers.
    """
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    has_one_mask = attention_mask is None or attention_mask.shape[1:3] == (1, 1)
    is_plain = not any(others.get(name) for name in ("dropout", "cache")) and others.get("position_bias") is None
    if length > 1 or heads == kv_heads or not (has_one_mask and is_plain):
        return otherwise(module, query, key, value, attention_mask, scaling=scaling, **others)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, size)
    # [B, kv_heads, groups, Dv]
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None
