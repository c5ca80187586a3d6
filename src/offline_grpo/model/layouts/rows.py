"""Layouts of rows: one row per sequence (`Padded`), or the tree layout, in which prefixes that sequences share are
computed once.

All sequences of a prompt share one row, which holds the tree of their prefixes. A token attends to its ancestors in
the tree, which are the tokens before it in its sequence.

    2+3=5   2+3=6   2+3=56      one row:     2 + 3 = 5 6 6          the second 6 is the child of 5
                                position:    0 1 2 3 4 4 5

It pays where prompts are long and completions short: its attention mask grows with the square of the row's length.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offline_grpo.types import TokenBatch

CHUNK = "attention_chunk_size"
"""In config.json: tokens attend to those of their own chunk of the sequence."""
MAX_ROW_TOKENS = 512
MAX_SHARE_OF_PADDED = 0.5


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


class Tree(Padded):
    """One row per prompt. Batches that share little, and models whose attention takes no mask, get padded rows."""

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        config: Any = decoder.config
        trees = prefix_trees(batch) if config._attn_implementation in ("sdpa", "eager") else None  # they take masks
        if trees is None or trees.token_ids.shape[1] > attention_window(decoder):
            return super().hidden_states(decoder, batch)
        mask = trees.attention_mask(next(decoder.parameters()).dtype)  # [R, 1, L, L]
        hidden = decoder(
            input_ids=trees.token_ids, position_ids=trees.position_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state  # [R, L, H]
        return hidden[trees.rows, trees.columns]  # [T, H]


@dataclass
class _Tree:
    """A row while it grows: one node per token, in an order in which parents come first."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of a root: itself
    _children: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent or -1, token) -> node

    def add(self, sequence: list[int]) -> list[int]:
        """The node of each token of a sequence, made where it is new."""
        path: list[int] = []
        parent = -1
        for position, token in enumerate(sequence):
            node = self._children.get((parent, token))
            if node is None:
                node = len(self.tokens)
                self._children[parent, token] = node
                self.tokens.append(token)
                self.positions.append(position)
                self.parents.append(max(parent, 0))
            path.append(node)
            parent = node
        return path


@dataclass(frozen=True)
class PrefixTrees:
    """A batch as R rows of up to L nodes each, and where each of its T tokens stands."""

    token_ids: Tensor  # [R, L]
    position_ids: Tensor  # [R, L]
    parents: Tensor  # [R, L]
    rows: Tensor  # [T]
    columns: Tensor  # [T]

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Added to attention scores, [R, 1, L, L]: 0 for a node and its ancestors, else the smallest number."""
        num_rows, length = self.token_ids.shape
        device = self.token_ids.device
        is_ancestor = torch.eye(length, dtype=torch.bool, device=device).repeat(num_rows, 1, 1)  # [R, L, L]
        every_row = torch.arange(num_rows, device=device)
        for node in range(1, length):  # parents come first, so theirs is complete
            is_ancestor[:, node] |= is_ancestor[every_row, self.parents[:, node]]
        blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        return torch.where(is_ancestor, torch.zeros_like(blocked), blocked)[:, None]


def prefix_trees(batch: TokenBatch) -> PrefixTrees | None:
    """The batch's trees, one row per distinct prompt; None where rows of whole sequences would be about as good."""
    token_ids, is_completion = (values.cpu().numpy().tobytes() for values in (batch.token_ids, batch.completion_mask))
    trees, device = _grown(token_ids, is_completion, batch.sequence_lengths), batch.token_ids.device
    return None if trees is None else PrefixTrees(**{name: values.to(device) for name, values in vars(trees).items()})


@lru_cache(maxsize=16)
def _grown(token_bytes: bytes, mask_bytes: bytes, lengths: tuple[int, ...]) -> PrefixTrees | None:
    """Kept, because the policy is trained on the batches that the reference has scored, in each epoch again."""
    token_ids = np.frombuffer(token_bytes, np.int64).tolist()
    is_completion = np.frombuffer(mask_bytes, np.bool_).tolist()
    trees: dict[tuple[int, ...], _Tree] = {}
    row_of_prompt: dict[tuple[int, ...], int] = {}
    rows: list[int] = []
    columns: list[int] = []
    start = 0
    for length in lengths:
        sequence = token_ids[start : start + length]
        mask = is_completion[start : start + length]
        prompt = tuple(sequence[: mask.index(True)] if True in mask else sequence)
        rows += [row_of_prompt.setdefault(prompt, len(row_of_prompt))] * length
        columns += trees.setdefault(prompt, _Tree()).add(sequence)
        start += length
    longest = max(len(tree.tokens) for tree in trees.values())
    num_padded = len(lengths) * max(lengths)
    if longest > MAX_ROW_TOKENS or len(trees) * longest > MAX_SHARE_OF_PADDED * num_padded:
        return None

    def stack(lists: list[list[int]]) -> Tensor:
        return torch.tensor([items + [0] * (longest - len(items)) for items in lists])

    return PrefixTrees(
        token_ids=stack([tree.tokens for tree in trees.values()]),
        position_ids=stack([tree.positions for tree in trees.values()]),
        parents=stack([tree.parents for tree in trees.values()]),
        rows=torch.tensor(rows),
        columns=torch.tensor(columns),
    )
