"""The loss head where a sampler's filters (top-p, top-k, min-p) left some tokens of the vocabulary: each target and its
alternatives, together its set K.

Only the logits z of these pairs of a row and a token are needed, P = N targets + M alternatives. Temperature T and
softmax follow on as many numbers:

    logprob = z[y] / T - ln sum(exp(z[j] / T), j in K)      H = -sum(p[j] ln p[j], j in K),  p = softmax of z / T over K

so a target alone has logprob 0, entropy 0 and gradients of 0. There are three ways to the logits and back: pairs of
vectors in chunks, on any device; the same in kernels (pair_kernel.py); and for large sets whole tiles of the [N, V]
matrix, of which the pairs are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offline_grpo.model.layers import is_compiled
from offline_grpo.model.lm_head import add_matmul_to, capped, matmul_into, stats_dtype

CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 128 * 2**20}
TILE_SIDE = {"cpu": 1024, "cuda": 8192}
TILED_FRAC = 1 / 100
"""Of [N, V]: with more pairs than that, tiles are faster."""


def filtered_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    *,
    num_alternatives: Tensor,
    alternatives: Tensor,
    softcap: float | None = None,
    entropy_requires_grad: bool,
) -> tuple[Tensor, Tensor]:
    """See `LossHead`, with softmax over each target and its alternatives in place of the vocabulary.

    Args:
        num_alternatives: [N] int64, which sum to M.
        alternatives: [M] int64 in [0, V): of one row after the other, without its target and none twice.
    """
    # The pairs. Their number is known without waiting for the GPU.
    size = len(targets)
    numbers = torch.arange(size, device=hidden.device)
    rows = torch.cat([numbers, numbers.repeat_interleave(num_alternatives, output_size=len(alternatives))])  # [P]
    ids = torch.cat([targets, alternatives])  # [P]
    z = _PairLogits.apply(hidden, weight, rows, ids, way_for(hidden, weight, len(ids)))  # [P]
    z = capped(z, None if bias is None else bias.to(z.dtype)[ids], softcap)

    def reduced(values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values[size:], how, lengths=num_alternatives, unsafe=True)  # [N]

    # Softmax relative to the largest logit of each set: differences keep their precision however large both are.
    peak = torch.maximum(z[:size], reduced(z, "max")).detach()  # [N]
    x = (z - peak[rows]) / temperature[rows]
    powers = x.exp()
    power_sum = powers[:size] + reduced(powers, "sum")
    with torch.set_grad_enabled(entropy_requires_grad and torch.is_grad_enabled()):
        terms = powers * x
        entropy = power_sum.log() - (terms[:size] + reduced(terms, "sum")) / power_sum
    return x[:size] - power_sum.log(), entropy


class Way(NamedTuple):
    """How products and sums of pairs are computed: in float32 or wider, and rounded once."""

    products: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(a, b, rows, ids) -> a[rows[p]] @ b[ids[p]], [P]"""
    sums: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(factors, a, rows, b, ids) -> of each row of a the sum of its factors[p] * b[ids[p]], in the shape of a"""


def way_for(hidden: Tensor, weight: Tensor, num_pairs: int) -> Way:
    """The fastest for so many pairs."""
    if num_pairs > TILED_FRAC * len(hidden) * len(weight):
        return TILED
    if hidden.dtype == torch.float64 or not is_compiled("auto", hidden.device):
        return GATHERED
    from offline_grpo.model import pair_kernel

    return Way(pair_kernel.products, pair_kernel.sums)


class _PairLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, way: Way) -> Tensor:
        ctx.save_for_backward(hidden, weight, rows, ids)
        ctx.way = way
        return way.products(hidden, weight, rows, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, rows, ids = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = ctx.way.sums(*grad_outputs, hidden, rows, weight, ids) if needs_hidden else None
        grad_weight = ctx.way.sums(*grad_outputs, weight, ids, hidden, rows) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


def _gathered_products(a: Tensor, b: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    out = a.new_empty(len(ids), dtype=stats_dtype(a))
    for chunk in _chunks(a, ids):
        out[chunk] = a[rows[chunk]].to(out.dtype).mul(b[ids[chunk]]).sum(-1)
    return out


def _gathered_sums(factors: Tensor, a: Tensor, rows: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    total = torch.zeros_like(a, dtype=factors.dtype)
    for chunk in _chunks(a, ids):
        total.index_add_(0, rows[chunk], b[ids[chunk]] * factors[chunk, None])
    return total.to(a.dtype)


def _chunks(a: Tensor, ids: Tensor) -> Iterator[slice]:
    size = max(CHUNK_BYTES[a.device.type] // (a.shape[1] * stats_dtype(a).itemsize), 1)
    return (slice(start, start + size) for start in range(0, len(ids), size))


def _tiled_products(a: Tensor, b: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    out = a.new_empty(len(ids), dtype=stats_dtype(a))
    for top, left, mine, index in _tiles(a, rows, b, ids):
        tile = out.new_empty(len(a[top]), len(b[left]))
        matmul_into(tile, a[top], b[left].T)
        out[mine] = tile[index]
    return out


def _tiled_sums(factors: Tensor, a: Tensor, rows: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    out, total = torch.zeros_like(a), factors.new_empty(0)
    for top, left, mine, index in _tiles(a, rows, b, ids):
        if left.start == 0:
            total = factors.new_zeros(a[top].shape)
        tile = (b if b.is_cuda else total).new_zeros(len(a[top]), len(b[left]))
        tile[index] = factors[mine].to(tile.dtype)
        add_matmul_to(total, tile, b[left])
        if left.stop >= len(b):  # these rows have all their tiles
            out[top] = total
    return out


def _tiles(
    a: Tensor, rows: Tensor, b: Tensor, ids: Tensor
) -> Iterator[tuple[slice, slice, Tensor, tuple[Tensor, Tensor]]]:
    """Of each tile of a @ b.T its rows, its columns, which pairs lie in it, and where. It waits for the GPU once, to
    learn how many they are; the products take longer.
    """
    side = TILE_SIDE[a.device.type]
    width = ceil(len(b) / side)  # in tiles
    tile = rows // side * width + ids // side  # [P]
    counts = tile.bincount(minlength=ceil(len(a) / side) * width).tolist()
    for number, mine in enumerate(tile.argsort().split(counts)):
        top, left = number // width * side, number % width * side
        yield slice(top, top + side), slice(left, left + side), mine, (rows[mine] - top, ids[mine] - left)


GATHERED = Way(_gathered_products, _gathered_sums)
TILED = Way(_tiled_products, _tiled_sums)
