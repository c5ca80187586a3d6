"""Runs a transformers decoder over a flat batch: the one place that knows about rows and padding.

Two layouts give the same hidden states:
    padded   one row per sequence, padded on the right. Causal attention never looks right, so no mask is needed.
    varlen   all sequences end to end in one row, with variable-length attention: no padding is computed at all (CUDA, 16-bit).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from offline_grpo.types import TokenBatch

VARLEN = "offline_grpo_varlen"


def choose_packing(packing: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve `auto`: varlen where its kernel exists (CUDA, bf16 or fp16), rows elsewhere."""
    if packing != "auto":
        return packing
    return "varlen" if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "padded"


def hidden_states(decoder: nn.Module, batch: TokenBatch, packing: str) -> Tensor:
    """Last hidden states [T, H] of every token of the batch, each attending to its own sequence only.

    Args:
        decoder: the transformers model below the language-model head.
        packing: "padded" or "varlen".
    """
    return _varlen(decoder, batch) if packing == "varlen" else _padded(decoder, batch)


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
