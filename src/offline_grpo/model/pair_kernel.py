"""The Triton kernels of `filtered_head`: they read each vector where it is, and add in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = tl.constexpr(16)  # of one step
WIDTH = tl.constexpr(128)  # numbers of each vector in one step
SUM_WIDTH = tl.constexpr(256)


def products(a: Tensor, b: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """See `filtered_head.Way`; `a` and `b` are contiguous."""
    out = torch.empty(len(ids), dtype=torch.float32, device=a.device)
    _products[(triton.cdiv(len(ids), PAIRS.value),)](a, b, rows, ids, out, len(ids), a.shape[1])
    return out


def sums(factors: Tensor, a: Tensor, rows: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """See `filtered_head.Way`."""
    # Pairs by their rows of `a`, each of which has those from one start to the next.
    rows, order = rows.sort(stable=True)
    starts = torch.searchsorted(rows, torch.arange(len(a) + 1, device=a.device))
    out = torch.empty_like(a)
    grid = len(a), triton.cdiv(a.shape[1], SUM_WIDTH.value)
    _sums[grid](factors[order], b, ids[order], starts, out, a.shape[1])
    return out


@triton.jit
def _products(a, b, rows, ids, out, num_pairs, size):
    p = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = p < num_pairs
    of_a = tl.load(rows + p, mask=inside, other=0) * size
    of_b = tl.load(ids + p, mask=inside, other=0) * size
    total = tl.zeros((PAIRS, WIDTH), tl.float32)
    for start in range(0, size, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        mask = inside[:, None] & (columns < size)[None, :]
        x = tl.load(a + of_a[:, None] + columns[None, :], mask=mask, other=0.0)
        y = tl.load(b + of_b[:, None] + columns[None, :], mask=mask, other=0.0)
        total += x.to(tl.float32) * y.to(tl.float32)
    tl.store(out + p, tl.sum(total, 1), mask=inside)


@triton.jit
def _sums(factors, b, ids, starts, out, size):
    # One program makes this width of one sum.
    row = tl.program_id(0)
    columns = tl.program_id(1) * SUM_WIDTH + tl.arange(0, SUM_WIDTH)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    total = tl.zeros((PAIRS, SUM_WIDTH), tl.float32)
    for first in range(start, end, PAIRS):
        p = first + tl.arange(0, PAIRS)
        factor = tl.load(factors + p, mask=p < end, other=0.0)
        of_b = tl.load(ids + p, mask=p < end, other=0) * size
        mask = (p < end)[:, None] & (columns < size)[None, :]
        total += factor[:, None] * tl.load(b + of_b[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * size + columns
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < size)
