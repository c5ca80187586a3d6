"""Runs a transformers decoder over a flat batch: the one place that knows about rows and padding.

Three layouts give the same hidden states:
    padded   one row per sequence, padded on the right. Causal attention never looks right, so no mask is needed.
    tree     one row per prompt, what its sequences share computed once (prefix_tree.py); padded where little is shared.
    varlen   all sequences end to end in one row, with variable-length attention: no padding is computed at all (CUDA, 16-bit).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from offline_grpo.errors import ConfigError
from offline_grpo.model.prefix_tree import PrefixTrees, prefix_trees
from offline_grpo.types import TokenBatch

VARLEN = "offline_grpo_varlen"


def choose_packing(packing: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve `auto`: varlen where its kernel exists (CUDA, bf16 or fp16), tree on the CPU, padded elsewhere.

    Raises:
        ConfigError: varlen where it does not.
    """
    has_kernel = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if packing == "varlen" and not has_kernel:
        raise ConfigError(
            "model.packing=varlen: needs a CUDA device and train.precision=bf16 or fp16, and this run has "
            f"{device.type} and {str(dtype).removeprefix('torch.')}; use model.packing=auto"
        )
    if packing != "auto":
        return packing
    if has_kernel:
        return "varlen"
    return "tree" if device.type == "cpu" else "padded"  # laying out trees on a GPU would wait for it


def hidden_states(decoder: nn.Module, batch: TokenBatch, packing: str) -> Tensor:
    """Last hidden states [T, H] of every token of the batch, each attending to its own sequence only.

    Args:
        decoder: the transformers model below the language-model head.
        packing: "padded", "tree" or "varlen".
    """
    if packing == "varlen":
        return _varlen(decoder, batch)
    trees = prefix_trees(batch) if packing == "tree" and _takes_masks(decoder, batch) else None
    return _padded(decoder, batch) if trees is None else _tree(decoder, trees)


def _takes_masks(decoder: nn.Module, batch: TokenBatch) -> bool:
    """Whether the model's attention can be told by a mask alone who sees whom."""
    config: Any = decoder.config
    window = getattr(config, "sliding_window", None)
    return config._attn_implementation in ("sdpa", "eager") and (window is None or max(batch.sequence_lengths) <= window)


def _tree(decoder: nn.Module, trees: PrefixTrees) -> Tensor:
    dtype = next(decoder.parameters()).dtype
    hidden = decoder(
        input_ids=trees.token_ids, position_ids=trees.position_ids, attention_mask=trees.attention_mask(dtype), use_cache=False
    ).last_hidden_state  # [R, L, H]
    return hidden[trees.rows, trees.columns]  # [T, H]


def _padded(decoder: nn.Module, batch: TokenBatch) -> Tensor:
    rows = batch.token_ids.new_zeros(batch.num_sequences, max(batch.sequence_lengths))  # [S, L]
    rows = rows.index_put((batch.sequence_ids, batch.position_ids), batch.token_ids)
    hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state  # [S, L, H]
    return hidden[batch.sequence_ids, batch.position_ids]  # [T, H]


def _varlen(decoder: nn.Module, batch: TokenBatch) -> Tensor:
    lengths = torch.tensor((0, *batch.sequence_lengths), dtype=torch.int32)
    boundaries = lengths.cumsum(0, dtype=torch.int32).to(batch.token_ids.device, non_blocking=True)  # [S+1]
    with packed_attention(decoder):
        hidden = decoder(
            input_ids=batch.token_ids[None],  # [1, T]
            position_ids=batch.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=boundaries,
            max_length_q=max(batch.sequence_lengths),
        ).last_hidden_state  # [1, T, H]
    return hidden[0]


@contextmanager
def packed_attention(decoder: nn.Module) -> Iterator[None]:
    """Variable-length attention inside, the model's own afterwards, which sampling needs.

    With gradient checkpointing the backward pass runs the model again, so it must happen inside too.
    """
    config: Any = decoder.config
    before = config._attn_implementation
    config._attn_implementation = VARLEN
    try:
        yield
    finally:
        config._attn_implementation = before


def _varlen_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, kv_heads, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """`torch.nn.attention.varlen` behind transformers' attention interface: [1, T, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    if cu_seq_lens_q is None:
        raise ValueError("variable-length attention needs cu_seq_lens_q: this model drops the arguments that its decoder is called with")
    if sliding_window is not None and max_length_q > sliding_window:
        raise ValueError(f"model.packing=varlen: no sliding-window attention (window {sliding_window}); use model.packing=padded")
    heads_per_kv = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if heads_per_kv > 1:
        k, v = k.repeat_interleave(heads_per_kv, dim=1), v.repeat_interleave(heads_per_kv, dim=1)
    out: Any = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1, 0),
    )
    return out[None], None


AttentionInterface.register(VARLEN, _varlen_attention)
AttentionMaskInterface.register(VARLEN, lambda *_args, **_kwargs: None)
