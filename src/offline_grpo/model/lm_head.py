"""The tiled loss head: logprob of each target token and entropy of its distribution, from hidden states, without the
[N, V] logits.

The vocabulary is walked in tiles of [N, v] logits. Tiles split the vocabulary and not the tokens because the weight
gradient is then written once, row block by row block; splitting tokens would add into all of [V, H] once per chunk.
Only where N is so large that v would be small, and the [N, H] gradient of the hidden states added to for every few
columns, does a tile have parts: some of the rows each, whose weight gradients are summed before they are written.

Inside a tile, log-probabilities are in bits (log2) relative to the row's largest logit: 2^x is cheaper than e^x, and a
difference of two logits keeps its precision however large both are. With z the logits, T the temperature, S the sum
over the vocabulary of 2^bits = exp((z - max z) / T), p = 2^bits / S and H the entropy:

    logprob = (z[y] - max z) / T - ln S               d logprob / dz = (onehot(y) - p) / T
    H       = ln S - ln2 * sum(2^bits * bits) / S     d H / dz       = -p * (ln p + H) / T

With a soft-cap c, z = c tanh(z' / c) of the product z', so gradients are multiplied by dz / dz' = 1 - (z / c)^2.

`_TiledHead` computes the logits again in the backward pass: four matrix products in all instead of three, for a memory
use that does not grow with N * V. `KeptHead`, for GPUs in bfloat16, keeps of a tile

    powers = exp((z - peak) / T), with the tile's own largest logit for the peak: [N, v] in bfloat16

so that the gradient of the logits, without an entropy term, is powers times a number for each row and tile. That number
goes to the other factor of both matrix products. So there are three products, and nothing of [N, v] is written in the
backward pass but one element per row: the target's, (1 - p) / T, which would lose its digits as the difference of two
rounded numbers. On a GPU one kernel (head_kernel.py) does all that happens between the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offline_grpo.errors import require
from offline_grpo.model.layers import is_compiled

CPU_TILE_BYTES = 8 * 2**20  # a tile and its scratch copy stay in the last-level cache
GPU_TILE_BYTES = 256 * 2**20  # large enough that the matrix products run at full speed
KEPT_TILE_BYTES = 512 * 2**20
MIN_TILE_WIDTH = 256
MIN_GPU_WIDTH = 8192  # narrower, it costs too much to add to the gradient of the hidden states
MAX_KEPT_WIDTH = 16384
"""The kernel holds a row of a tile in registers."""
MIN_SHIFT = -60.0
"""In bits: a tile whose peak lies this far below the row's adds nothing to the row but its target. Keeps scaled numbers
in range.
"""


@dataclass(frozen=True, kw_only=True)
class TiledHead:
    """The head described above, a `LossHead`."""

    tile_width: int | None
    kept_gib: float = 3.0

    def __post_init__(self) -> None:
        require(self.kept_gib >= 0, "model.head.kept_gib", self.kept_gib, "must be 0 (nothing is kept) or more")
        is_width = self.tile_width is None or self.tile_width > 0
        require(is_width, "model.head.tile_width", self.tile_width, "must be at least 1, or null")

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        *,
        softcap: float | None = None,
        entropy_requires_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `LossHead`. Logprobs of targets outside [0, V) are NaN. Logits are float32, or float64 if `hidden` is."""
        is_kept = self.kept_gib > 0 and not entropy_requires_grad and hidden.dtype == torch.bfloat16
        if is_kept and is_compiled("auto", hidden.device):
            height, width = self._shape(KEPT_TILE_BYTES // 4, MIN_GPU_WIDTH, hidden, weight)
            kept_bytes = int(self.kept_gib * 2**30)
            shape = height, min(width, MAX_KEPT_WIDTH)
            return KeptHead.apply(hidden, weight, bias, targets, temperature, softcap, shape, kept_bytes)
        on_cpu = hidden.device.type == "cpu"
        num_logits = (CPU_TILE_BYTES if on_cpu else GPU_TILE_BYTES) // stats_dtype(hidden).itemsize
        shape = self._shape(num_logits, MIN_TILE_WIDTH if on_cpu else MIN_GPU_WIDTH, hidden, weight)
        return _TiledHead.apply(hidden, weight, bias, targets, temperature, softcap, shape, entropy_requires_grad)

    def _shape(self, num_logits: int, min_width: int, hidden: Tensor, weight: Tensor) -> tuple[int, int]:
        """Rows and columns of a part of a tile."""
        num_tokens, vocab_size = max(len(hidden), 1), len(weight)
        if self.tile_width is not None:
            return num_tokens, min(self.tile_width, vocab_size)
        height = min(num_tokens, num_logits // min_width)
        return height, min(num_logits // height // MIN_TILE_WIDTH * MIN_TILE_WIDTH, vocab_size)


class TileStats(NamedTuple):
    """Of each row of a part, or of a whole row, [N] each. bits = log2(e) (z - peak) / T."""

    peak: Tensor  # the largest logit
    power_sum: Tensor  # sum(2^bits)
    bits_sum: Tensor  # sum(2^bits * bits)


def _parts_of(hidden: Tensor, weight: Tensor, shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Columns and rows of each part, tile by tile; the last ones may be smaller. No tokens are one part, too."""
    height, width = shape
    for left in range(0, len(weight), width):
        for top in range(0, max(len(hidden), 1), height):
            yield slice(left, min(left + width, len(weight))), slice(top, min(top + height, len(hidden)))


def _locate(targets: Tensor, tile: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """An index into [N, v] of every row's target, and [N] bool: whether it lies in this tile. Else it is arbitrary."""
    local = targets - tile.start
    width = tile.stop - tile.start
    index = (torch.arange(len(targets), device=targets.device), local.clamp(0, width - 1))
    return index, (local >= 0) & (local < width)


def _merge(parts: Sequence[TileStats], num_tiles: int, bits_per_logit: Tensor) -> tuple[TileStats, Tensor]:
    """Of whole rows; and by how many bits each tile's peak lies below the row's, [tiles, N], <= 0."""
    peaks, power_sums, bits_sums = (torch.cat(values).view(num_tiles, -1) for values in zip(*parts, strict=True))
    peak = peaks.amax(0)
    shifts = (peaks - peak) * bits_per_logit
    factor = torch.exp2(shifts)
    return TileStats(peak, (factor * power_sums).sum(0), (factor * (bits_sums + shifts * power_sums)).sum(0)), shifts


def _tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, shape: tuple[int, int]
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Of each part its columns, rows, weights [v, H], logits [N, v] before the temperature, and scratch [N, v]. The
    next part overwrites the last two. A CPU multiplies in the dtype of the logits.
    """
    hidden = hidden if hidden.is_cuda else hidden.to(stats_dtype(hidden))
    buffers = torch.empty(2, math.prod(shape), dtype=stats_dtype(hidden), device=hidden.device)
    for columns, rows in _parts_of(hidden, weight, shape):
        tile_weight = weight[columns].to(hidden.dtype)
        logits = _logits(buffers[0], hidden[rows], tile_weight)
        if bias is not None:
            logits.add_(bias[columns])
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        yield columns, rows, tile_weight, logits, buffers[1, : logits.numel()].view_as(logits)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        softcap: float | None,
        shape: tuple[int, int],
        entropy_requires_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = stats_dtype(hidden)
        bits_per_logit = 1 / (math.log(2) * temperature.to(dtype))  # [N]

        # Of each tile its largest logit and two sums, and the logit of each row's target in the tile that has it.
        target_logits = torch.full_like(bits_per_logit, torch.nan)  # [N]
        stats: list[TileStats] = []
        for columns, rows, _, logits, scratch in _tiles(hidden, weight, bias, softcap, shape):
            index, inside = _locate(targets[rows], columns)
            target_logits[rows] = torch.where(inside, logits[index], target_logits[rows])
            peak = logits.amax(-1)  # [N]
            bits = logits.sub_(peak[:, None]).mul_(bits_per_logit[rows, None])  # [N, v], <= 0
            powers = torch.exp2(bits, out=scratch)
            stats.append(TileStats(peak, powers.sum(-1), powers.mul_(bits).sum(-1)))

        # Of whole rows; the backward pass needs no more than these to compute the logits again.
        (peak, power_sum, bits_sum), _ = _merge(stats, math.ceil(len(weight) / shape[1]), bits_per_logit)
        logprobs = (target_logits - peak) / temperature - power_sum.log()
        entropy = power_sum.log() - math.log(2) * bits_sum / power_sum
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, bits_per_logit, peak, power_sum, entropy)
        ctx.softcap, ctx.shape = softcap, shape
        ctx.set_materialize_grads(False)
        if not entropy_requires_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_logprobs, grad_entropy = grad_outputs  # [N] each, None where the output was not used
        hidden, weight, bias, targets, temperature, bits_per_logit, peak, power_sum, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # a sum over tiles, [N, H]
        grad_hidden = torch.zeros_like(hidden, dtype=stats_dtype(hidden)) if needs_hidden else None
        grad_weight = _Summed(weight, len(hidden)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=stats_dtype(hidden)) if needs_bias else None  # [V]

        # grad_logits = 2^bits * (offset + slope * bits), plus target_grad at the target
        target_grad = torch.zeros_like(peak) if grad_logprobs is None else grad_logprobs / temperature  # [N]
        offset, slope = -target_grad / power_sum, None  # [N]
        if grad_entropy is not None:
            entropy_grad = grad_entropy / (temperature * power_sum)
            offset, slope = offset - entropy_grad * (entropy - power_sum.log()), -math.log(2) * entropy_grad

        inputs = hidden if hidden.is_cuda else hidden.to(stats_dtype(hidden))  # as in `_tiles`
        for columns, rows, tile_weight, logits, scratch in _tiles(inputs, weight, bias, ctx.softcap, ctx.shape):
            slope_of_cap = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square_()  # [N, v]
            bits = logits.sub_(peak[rows, None]).mul_(bits_per_logit[rows, None])  # [N, v]
            grad_logits = torch.exp2(bits, out=scratch)  # [N, v]
            by = offset[rows, None]
            grad_logits.mul_(by if slope is None else bits.mul_(slope[rows, None]).add_(by))
            index, inside = _locate(targets[rows], columns)
            grad_logits[index] += torch.where(inside, target_grad[rows], 0)  # one element per row: no two writes meet
            if slope_of_cap is not None:
                grad_logits.mul_(slope_of_cap)

            # What bias, hidden states and weights get of it.
            if grad_bias is not None:
                grad_bias[columns] += grad_logits.sum(0)
            grad_logits = grad_logits.to(inputs.dtype)
            if grad_hidden is not None:
                add_matmul_to(grad_hidden[rows], grad_logits, tile_weight)
            if grad_weight is not None:
                grad_weight.add(columns, rows, grad_logits.T, inputs[rows])
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight and grad_weight.whole, grad_bias, *[None] * 5


class KeptHead(torch.autograd.Function):
    """See `LossHead`; the entropy carries no gradient. Parts beyond `kept_bytes` are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        softcap: float | None,
        shape: tuple[int, int],
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        bits_per_logit = 1 / (math.log(2) * temperature.float())  # [N]
        keeps = any(ctx.needs_input_grad[:3])
        limit = kept_bytes // (2 * math.prod(shape)) if keeps else 0  # parts
        kept: list[Tensor | None] = []
        stats: list[TileStats] = []

        # As above; and the powers of as many tiles as may be kept.
        target_logits = torch.full_like(bits_per_logit, torch.nan)  # [N]
        buffer = hidden.new_empty(math.prod(shape), dtype=torch.float32)
        for columns, rows in _parts_of(hidden, weight, shape):
            logits = _logits(buffer, hidden[rows], weight[columns])  # [N, v]
            tile_bias = None if bias is None else bias[columns]
            index, inside = _locate(targets[rows], columns)
            here = capped(logits[index], None if bias is None else bias[targets[rows]], softcap)
            target_logits[rows] = torch.where(inside, here, target_logits[rows])
            found, powers = _stats_and_powers(logits, tile_bias, softcap, bits_per_logit[rows], keep=len(kept) < limit)
            stats.append(found)
            kept.append(powers)

        # Of whole rows. Each tile's powers are relative to its own peak, which lies `shifts` below the row's.
        merged, shifts = _merge(stats, math.ceil(len(weight) / shape[1]), bits_per_logit)
        logprobs = (target_logits - merged.peak) / temperature - merged.power_sum.log()
        entropy = merged.power_sum.log() - math.log(2) * merged.bits_sum / merged.power_sum
        ctx.mark_non_differentiable(entropy)
        if keeps:
            inputs = hidden, weight, bias, targets, temperature
            ctx.save_for_backward(*inputs, bits_per_logit, target_logits, logprobs, merged.power_sum, shifts)
            ctx.kept, ctx.softcap, ctx.shape = kept, softcap, shape
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, temperature, bits_per_logit, *of_rows, shifts = ctx.saved_tensors
        target_logits, logprobs, power_sum = of_rows  # [N] each
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # a sum over tiles, [N, H]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = _Summed(weight, len(hidden)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        slope = grad_outputs[0] / temperature  # [N], of the target's logit
        slope_of_cap = 1.0 if ctx.softcap is None else 1 - (target_logits / ctx.softcap).square()
        target = torch.expm1(logprobs) * power_sum * slope_of_cap  # [N], (p - 1) S
        buffer = None
        for number, (columns, rows) in enumerate(_parts_of(hidden, weight, ctx.shape)):
            # The tile's powers, kept or made again.
            powers, ctx.kept[number] = ctx.kept[number], None  # [N, v]
            if powers is None:
                if buffer is None:
                    buffer = hidden.new_empty(math.prod(ctx.shape), dtype=torch.float32)
                logits = _logits(buffer, hidden[rows], weight[columns])
                tile_bias = None if bias is None else bias[columns]
                _, powers = _stats_and_powers(logits, tile_bias, ctx.softcap, bits_per_logit[rows], keep=True)
                assert powers is not None
            # grad_logits = factor * powers. The target's entry is replaced, so that the same product gives its own.
            shift = shifts[columns.start // ctx.shape[1], rows].clamp(min=MIN_SHIFT)  # [N]
            index, inside = _locate(targets[rows], columns)
            of_target = target[rows] * torch.exp2(-shift)
            powers[index] = torch.where(inside, of_target, powers[index].float()).to(powers.dtype)
            factor = -slope[rows] * torch.exp2(shift) / power_sum[rows]  # [N]: grad_logits = factor * powers
            if grad_bias is not None:
                grad_bias[columns] += _product(powers.T, factor[:, None].to(powers.dtype))[:, 0]
            if grad_hidden is not None:
                grad_hidden[rows].addcmul_(_product(powers, weight[columns]), factor[:, None])
            if grad_weight is not None:
                grad_weight.add(columns, rows, powers.T, (hidden[rows] * factor[:, None]).to(hidden.dtype))
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight and grad_weight.whole, grad_bias, *[None] * 5


class _Summed:
    """The gradient of the weights, [V, H]: of each tile the sum over its parts, rounded once."""

    def __init__(self, weight: Tensor, num_tokens: int) -> None:
        self.whole, self.num_tokens = torch.empty_like(weight), num_tokens
        self.tile: Tensor | None = None  # [v, H], of the parts before

    def add(self, columns: slice, rows: slice, a: Tensor, b: Tensor) -> None:
        is_last = rows.stop == self.num_tokens
        if self.tile is None and is_last:
            matmul_into(self.whole[columns], a, b)
            return
        if self.tile is None:
            self.tile = _product(a, b)
        else:
            add_matmul_to(self.tile, a, b)
        if is_last:
            self.whole[columns], self.tile = self.tile, None


def stats_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _logits(buffer: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, v] in the memory of `buffer`, without bias and soft-cap."""
    logits = buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    matmul_into(logits, hidden, weight.T)
    return logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider."""
    out = a.new_empty(len(a), b.shape[1], dtype=stats_dtype(a))
    matmul_into(out, a, b)
    return out


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, accumulated in float32 or wider and rounded to `out`'s dtype once."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.dtype.itemsize >= out.dtype.itemsize:
        out.copy_(a @ b)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # only CUDA multiplies 16-bit matrices into float32; widened first, they give the same
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_matmul_to(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in `out`'s dtype: a product rounded to 16 bits before every addition would bias the sum."""
    if a.dtype != out.dtype and a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def capped(logits: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = logits if bias is None else logits + bias
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _stats_and_powers(
    logits: Tensor, bias: Tensor | None, softcap: float | None, bits_per_logit: Tensor, *, keep: bool
) -> tuple[TileStats, Tensor | None]:
    """A tile's statistics, and 2^bits in bfloat16, times the slope of the soft-cap, if asked for."""
    if logits.is_cuda:
        from offline_grpo.model.head_kernel import stats_and_powers

        stats, powers = stats_and_powers(logits, bias, softcap, bits_per_logit, keep=keep)
        return TileStats(*stats), powers
    z = capped(logits, bias, softcap)
    peak = z.amax(-1)
    bits = (z - peak[:, None]) * bits_per_logit[:, None]
    powers = torch.exp2(bits)
    slope = 1 if softcap is None else 1 - (z / softcap).square()
    return TileStats(peak, powers.sum(-1), (powers * bits).sum(-1)), (powers * slope).bfloat16() if keep else None
