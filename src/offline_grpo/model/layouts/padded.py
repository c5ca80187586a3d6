"""The padded layout: one row per sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from offline_grpo.types import TokenBatch


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

    def attention(self, decoder: nn.Module) -> AbstractContextManager[None]:
        """The model's own."""
        return nullcontext()

    def for_memory_plan(self) -> Padded:
        """Runs on the meta device as it is."""
        return self
