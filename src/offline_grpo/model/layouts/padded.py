"""The padded layout: one row per sequence."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

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
        rows = batch.token_ids.new_zeros(batch.num_sequences, max(batch.sequence_lengths))  # [S, L]
        rows = rows.index_put((batch.sequence_ids, batch.position_ids), batch.token_ids)
        hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state  # [S, L, H]
        return hidden[batch.sequence_ids, batch.position_ids]  # [T, H]

    def attention(self, decoder: nn.Module, batch: TokenBatch) -> AbstractContextManager[None]:
        """The model's own."""
        return nullcontext()


def attention_window(decoder: nn.Module) -> float:
    """How many tokens the layer with the shortest window or chunk attends to; infinite if all see everything."""
    sizes = [size for name, size in vars(decoder.config).items() if name.endswith(("window", "window_size", CHUNK))]
    # True, which is 1, says that there is a window
    return min((size for size in sizes if isinstance(size, int) and size > 1), default=math.inf)
