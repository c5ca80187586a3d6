"""What the loss heads do with tiles of the vocabulary: cut it, find targets in a tile, put the statistics of tiles
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TileStats(NamedTuple):
    """Of each row of a tile, or of a whole row, [N] each: the largest logit, sum(2^bits) and sum(2^bits * bits), where
    bits = log2(e) (z - peak) / T."""

    peak: Tensor
    power_sum: Tensor
    bits_sum: Tensor


def tiles_of(vocab_size: int, width: int) -> Iterator[slice]:
    """The columns of each tile; the last one may be narrower."""
    return (slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width))


def locate(targets: Tensor, tile: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """An index into [N, v] of every row's target, and [N] bool: whether the target lies in this tile (else the index is
    arbitrary).
    """
    local = targets - tile.start
    width = tile.stop - tile.start
    index = (torch.arange(len(targets), device=targets.device), local.clamp(0, width - 1))
    return index, (local >= 0) & (local < width)


def merge(tiles: Sequence[TileStats], bits_per_logit: Tensor) -> tuple[TileStats, Tensor]:
    """Of whole rows, from those of their tiles; and by how many bits each tile's peak lies below the row's, [tiles, N],
    <= 0.
    """
    peaks, power_sums, bits_sums = (torch.stack(values) for values in zip(*tiles, strict=True))  # [tiles, N]
    peak = peaks.amax(0)
    shifts = (peaks - peak) * bits_per_logit
    factor = torch.exp2(shifts)
    return TileStats(peak, (factor * power_sums).sum(0), (factor * (bits_sums + shifts * power_sums)).sum(0)), shifts
