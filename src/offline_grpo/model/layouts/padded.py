"""The padded layout: one row per sequence."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from offline_grpo.types import TokenBatch

CHUNK = "attention_chunk_size"
"""In config.json: tokens attend to those of their own chunk of the sequence."""


class Padded:
    """One row per sequence, padded on the right to the longest. Runs everywhere.

    Causal attention never looks to the right, so padding needs no mask.
    """

    pads = True

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Accept every device and format."""

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        """See `interfaces.Layout`."""
        rows = batch.token_ids.new_zeros(batch.num_sequences, max(batch.sequence_lengths))  # [S, L]
        rows = rows.index_put((batch.sequence_ids, batch.position_ids), batch.token_ids)
        hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state  # [S, L, H]
        return hidden[batch.sequence_ids, batch.position_ids]  # [T, H]

    def attention(self, decoder: nn.Module, batch: TokenBatch) -> AbstractContextManager[None]:
        """The model's own."""
        return nullcontext()

    def for_memory_plan(self) -> Padded:
        """Runs on the meta device as it is."""
        return self


def attention_window(decoder: nn.Module) -> float:
    """How many tokens its most short-sighted layer attends to: sliding windows, local attention, chunks. Infinite if all see everything."""
    config: Any = decoder.config
    names = [name for name in config.to_dict() if "window" in name or name == CHUNK]
    values = [getattr(config, name) for name in names]
    return min((value for value in values if isinstance(value, int) and not isinstance(value, bool)), default=math.inf)
