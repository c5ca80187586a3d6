"""The sums of `offline_grpo_weights` on a GPU: one launch for many tensors, each of which is read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT, BLOCK = 256, 1024  # programs for each tensor, and the words that one reads at a time


def add_up(batch: Sequence[tuple[Tensor, int]]) -> Tensor:
    """[N] int64, on the tensors' device, which this does not wait for.

    Args:
        batch: words of each tensor, and i of the first.
    """
    words = [one.to(torch.int64) for one, _ in batch]
    device = words[0].device
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    table = [[one.data_ptr(), len(one), first] for one, (_, first) in zip(words, batch, strict=True)]
    with torch.cuda.device_of(found):
        _add_up[len(words), SPLIT](torch.tensor(table).to(device), found, SPLIT, BLOCK)  # pyright: ignore[reportArgumentType]
    return found


@triton.jit
def _add_up(table, totals, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    words = tl.load(table + 3 * row).to(tl.pointer_type(tl.int64))
    count, first = tl.load(table + 3 * row + 1), tl.load(table + 3 * row + 2)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, count, SPLIT * BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(words + i, mask=i < count, other=0) * (2 * (first + i) + 1)
    tl.atomic_add(totals + row, tl.sum(total, 0))
