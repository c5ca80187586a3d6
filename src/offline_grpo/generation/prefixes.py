"""Keys and values of what episodes have said so far, so that a further turn costs its new tokens alone.

Those of a token depend on the tokens before it alone, so any common beginning serves, whoever computed it: an earlier
turn of the episode, or another one with the same instructions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class Prefix:
    """N tokens from the start of a sequence."""

    token_ids: np.ndarray  # [N]
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values of each, [heads, N, D]


@dataclass
class Prefixes:
    """What is kept while weights do not change: the last sequence of each episode, and what several begin with. Beyond
    `capacity` sequences the one that was not used for longest goes.
    """

    capacity: int
    _kept: OrderedDict[Hashable, Prefix] = field(default_factory=OrderedDict, init=False)

    def longest(self, owner: Hashable, prompt: Sequence[int]) -> tuple[int, Prefix | None]:
        """How many tokens of a prompt are known, all but the last at most, because its logits are wanted; and from
        what: the owner's own sequence, or for want of one any other.
        """
        candidates = [owner] if owner in self._kept else list(self._kept)
        num_known = [min(num_equal(self._kept[each].token_ids, prompt), len(prompt) - 1) for each in candidates]
        best = max(range(len(candidates)), key=num_known.__getitem__, default=None)
        if best is None or num_known[best] == 0:
            return 0, None
        self._kept.move_to_end(candidates[best])
        return num_known[best], self._kept[candidates[best]]

    def keep(self, owner: Hashable, token_ids: Sequence[int], cache: Cache, *, row: int, start: int) -> None:
        """Copy the keys and values of tokens that stand in a row of a cache, from `start` on."""
        place = row, slice(None), slice(start, start + len(token_ids))
        layers: Any = cache.layers
        self._kept[owner] = Prefix(
            np.array(token_ids), tuple((x.keys[place].clone(), x.values[place].clone()) for x in layers)
        )
        self._kept.move_to_end(owner)
        if len(self._kept) > self.capacity:
            self._kept.popitem(last=False)


def fill(cache: Cache, beginnings: Sequence[tuple[int, Prefix | None]]) -> None:
    """Put the first n tokens of each prefix into a row of an empty cache; all end at the same place."""
    width, longest = max(beginnings, key=lambda each: each[0])
    for number, pair in enumerate(longest.layers if longest is not None and width > 0 else ()):
        of_layer = []
        for kind, example in enumerate(pair):
            rows = example.new_zeros(len(beginnings), example.shape[0], width, example.shape[2])
            for row, (length, prefix) in zip(rows, beginnings, strict=True):
                if prefix is not None and length > 0:
                    row[:, width - length :] = prefix.layers[number][kind][:, :length]
            of_layer.append(rows)
        cache.update(*of_layer, number)


def num_equal(some: Sequence[int] | np.ndarray, others: Sequence[int] | np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(some), len(others))
    differ = np.asarray(some[:length]) != np.asarray(others[:length])
    return int(differ.argmax()) if differ.any() else length
