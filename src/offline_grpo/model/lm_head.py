"""The tiled loss head: logprob of each target token and entropy of its distribution, from hidden states, without the
[N, V] logits.

The vocabulary is walked in tiles of [N, v] logits. Tiles split the vocabulary and not the tokens because the weight
gradient is then written once, row block by row block; splitting tokens would add into all of [V, H] once per chunk.

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
from offline_grpo.model.layers import is_compiled_by_default

CPU_TILE_BYTES = 8 * 2**20  # a tile and its scratch copy stay in the last-level cache
GPU_TILE_BYTES = 256 * 2**20  # large enough that the matrix products run at full speed
KEPT_TILE_BYTES = 512 * 2**20
MIN_TILE_WIDTH = 256
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
        if is_kept and is_compiled_by_default(hidden.device):
            width = min(self._width(KEPT_TILE_BYTES, len(hidden), 4), MAX_KEPT_WIDTH, len(weight))
            kept_bytes = int(self.kept_gib * 2**30)
            return KeptHead.apply(hidden, weight, bias, targets, temperature, softcap, width, kept_bytes)
        budget = CPU_TILE_BYTES if hidden.device.type == "cpu" else GPU_TILE_BYTES
        width = min(self._width(budget, len(hidden), _stats_dtype(hidden).itemsize), len(weight))
        return _TiledHead.apply(hidden, weight, bias, targets, temperature, softcap, width, entropy_requires_grad)

    def _width(self, tile_bytes: int, num_tokens: int, bytes_per_logit: int) -> int:
        if self.tile_width is not None:
            return self.tile_width
        width = tile_bytes // (max(num_tokens, 1) * bytes_per_logit)
        return max(width // MIN_TILE_WIDTH * MIN_TILE_WIDTH, MIN_TILE_WIDTH)


class TileStats(NamedTuple):
    """Of each row of a tile, or of a whole row, [N] each. bits = log2(e) (z - peak) / T."""

    peak: Tensor  # the largest logit
    power_sum: Tensor  # sum(2^bits)
    bits_sum: Tensor  # sum(2^bits * bits)


def _tiles_of(vocab_size: int, width: int) -> Iterator[slice]:
    """The columns of each tile; the last one may be narrower."""
    return (slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width))


def _locate(targets: Tensor, tile: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """An index into [N, v] of every row's target, and [N] bool: whether it lies in this tile. Else it is arbitrary."""
    local = targets - tile.start
    width = tile.stop - tile.start
    index = (torch.arange(len(targets), device=targets.device), local.clamp(0, width - 1))
    return index, (local >= 0) & (local < width)


def _merge(tiles: Sequence[TileStats], bits_per_logit: Tensor) -> tuple[TileStats, Tensor]:
    """Of whole rows; and by how many bits each tile's peak lies below the row's, [tiles, N], <= 0."""
    peaks, power_sums, bits_sums = (torch.stack(values) for values in zip(*tiles, strict=True))  # [tiles, N]
    peak = peaks.amax(0)
    shifts = (peaks - peak) * bits_per_logit
    factor = torch.exp2(shifts)
    return TileStats(peak, (factor * power_sums).sum(0), (factor * (bits_sums + shifts * power_sums)).sum(0)), shifts


def _tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, width: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Of each tile its columns, weights [v, H], logits [N, v] before the temperature, and scratch [N, v]. The next tile
    overwrites the last two.
    """
    buffers = torch.empty(2, len(hidden) * width, dtype=_stats_dtype(hidden), device=hidden.device)
    for columns in _tiles_of(len(weight), width):
        tile_weight = weight[columns].to(hidden.dtype)
        logits = _logits(buffers[0], hidden, tile_weight)
        if bias is not None:
            logits.add_(bias[columns])
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        yield columns, tile_weight, logits, buffers[1, : logits.numel()].view_as(logits)


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
        width: int,
        entropy_requires_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _stats_dtype(hidden)
        bits_per_logit = 1 / (math.log(2) * temperature.to(dtype))  # [N]
        target_logits = torch.full_like(bits_per_logit, torch.nan)  # [N]
        tile_stats: list[TileStats] = []
        for columns, _, logits, scratch in _tiles(_matmul_input(hidden), weight, bias, softcap, width):
            index, inside = _locate(targets, columns)
            target_logits = torch.where(inside, logits[index], target_logits)
            peak = logits.amax(-1)  # [N]
            bits = logits.sub_(peak[:, None]).mul_(bits_per_logit[:, None])  # [N, v], <= 0
            powers = torch.exp2(bits, out=scratch)
            tile_stats.append(TileStats(peak, powers.sum(-1), powers.mul_(bits).sum(-1)))

        (peak, power_sum, bits_sum), _ = _merge(tile_stats, bits_per_logit)
        logprobs = (target_logits - peak) / temperature - power_sum.log()
        entropy = power_sum.log() - math.log(2) * bits_sum / power_sum
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, bits_per_logit, peak, power_sum, entropy)
        ctx.softcap, ctx.width = softcap, width
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
        grad_hidden = torch.zeros_like(hidden, dtype=_stats_dtype(hidden)) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None  # [V, H]
        grad_bias = torch.empty_like(bias) if needs_bias else None  # [V]

        # grad_logits = 2^bits * (offset + slope * bits), plus target_grad at the target
        target_grad = torch.zeros_like(peak) if grad_logprobs is None else grad_logprobs / temperature  # [N]
        offset, slope = -target_grad / power_sum, None  # [N]
        if grad_entropy is not None:
            entropy_grad = grad_entropy / (temperature * power_sum)
            offset, slope = offset - entropy_grad * (entropy - power_sum.log()), -math.log(2) * entropy_grad

        inputs = _matmul_input(hidden)
        for columns, tile_weight, logits, scratch in _tiles(inputs, weight, bias, ctx.softcap, ctx.width):
            slope_of_cap = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square_()  # [N, v]
            bits = logits.sub_(peak[:, None]).mul_(bits_per_logit[:, None])  # [N, v]
            grad_logits = torch.exp2(bits, out=scratch)  # [N, v]
            grad_logits.mul_(offset[:, None] if slope is None else bits.mul_(slope[:, None]).add_(offset[:, None]))
            index, inside = _locate(targets, columns)
            grad_logits[index] += torch.where(inside, target_grad, 0)  # one element per row: no two writes meet
            if slope_of_cap is not None:
                grad_logits.mul_(slope_of_cap)
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(0)
            grad_logits = grad_logits.to(inputs.dtype)
            if grad_hidden is not None:
                _add_matmul_to(grad_hidden, grad_logits, tile_weight)
            if grad_weight is not None:
                _matmul_into(grad_weight[columns], grad_logits.T, inputs)
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


class KeptHead(torch.autograd.Function):
    """See `LossHead`; the entropy carries no gradient. Tiles beyond `kept_bytes` are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        softcap: float | None,
        width: int,
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        bits_per_logit = 1 / (math.log(2) * temperature.float())  # [N]
        keeps = any(ctx.needs_input_grad[:3])
        limit = kept_bytes // (2 * max(len(hidden), 1) * width) if keeps else 0  # tiles
        kept: list[Tensor | None] = []
        stats: list[TileStats] = []
        target_logits = torch.full_like(bits_per_logit, torch.nan)  # [N]
        buffer = hidden.new_empty(len(hidden) * width, dtype=torch.float32)
        for columns in _tiles_of(len(weight), width):
            logits = _logits(buffer, hidden, weight[columns])  # [N, v]
            tile_bias = None if bias is None else bias[columns]
            index, inside = _locate(targets, columns)
            here = _capped(logits[index], None if bias is None else bias[targets], softcap)
            target_logits = torch.where(inside, here, target_logits)
            found, powers = _stats_and_powers(logits, tile_bias, softcap, bits_per_logit, keep=len(kept) < limit)
            stats.append(found)
            kept.append(powers)
        merged, shifts = _merge(stats, bits_per_logit)
        logprobs = (target_logits - merged.peak) / temperature - merged.power_sum.log()
        entropy = merged.power_sum.log() - math.log(2) * merged.bits_sum / merged.power_sum
        ctx.mark_non_differentiable(entropy)
        if keeps:
            inputs = hidden, weight, bias, targets, temperature
            ctx.save_for_backward(*inputs, bits_per_logit, target_logits, logprobs, merged.power_sum, shifts)
            ctx.kept, ctx.softcap, ctx.width = kept, softcap, width
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, temperature, bits_per_logit, *of_rows, shifts = ctx.saved_tensors
        target_logits, logprobs, power_sum = of_rows  # [N] each
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # a sum over tiles, [N, H]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        slope = grad_outputs[0] / temperature  # [N], of the target's logit
        slope_of_cap = 1.0 if ctx.softcap is None else 1 - (target_logits / ctx.softcap).square()
        target = torch.expm1(logprobs) * power_sum * slope_of_cap  # [N], (p - 1) S
        buffer = None
        for number, columns in enumerate(_tiles_of(len(weight), ctx.width)):
            powers, ctx.kept[number] = ctx.kept[number], None  # [N, v]
            if powers is None:
                if buffer is None:
                    buffer = hidden.new_empty(len(hidden) * ctx.width, dtype=torch.float32)
                logits = _logits(buffer, hidden, weight[columns])
                tile_bias = None if bias is None else bias[columns]
                _, powers = _stats_and_powers(logits, tile_bias, ctx.softcap, bits_per_logit, keep=True)
                assert powers is not None
            shift = shifts[number].clamp(min=MIN_SHIFT)  # [N]
            index, inside = _locate(targets, columns)
            powers[index] = torch.where(inside, target * torch.exp2(-shift), powers[index].float()).to(powers.dtype)
            factor = -slope * torch.exp2(shift) / power_sum  # [N]: grad_logits = factor * powers
            if grad_bias is not None:
                grad_bias[columns] = _product(powers.T, factor[:, None].to(powers.dtype))[:, 0]
            if grad_hidden is not None:
                grad_hidden.addcmul_(_product(powers, weight[columns]), factor[:, None])
            if grad_weight is not None:
                torch.mm(powers.T, (hidden * factor[:, None]).to(hidden.dtype), out=grad_weight[columns])
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


def _stats_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _matmul_input(hidden: Tensor) -> Tensor:
    """`hidden` in the dtype to multiply in: a CPU multiplies in that of the logits."""
    return hidden if hidden.is_cuda else hidden.to(_stats_dtype(hidden))


def _logits(buffer: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, v] in the memory of `buffer`, without bias and soft-cap."""
    logits = buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    _matmul_into(logits, hidden, weight.T)
    return logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    out = a.new_empty(len(a), b.shape[1], dtype=torch.float32)
    _matmul_into(out, a, b)
    return out


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, accumulated in float32 or wider and rounded to `out`'s dtype once."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.dtype.itemsize >= out.dtype.itemsize:
        out.copy_(a @ b)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # only CUDA multiplies 16-bit matrices into float32; widened first, they give the same
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_matmul_to(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in `out`'s dtype: a product rounded to 16 bits before every addition would bias the sum."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _capped(logits: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
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
    capped = _capped(logits, bias, softcap)
    peak = capped.amax(-1)
    bits = (capped - peak[:, None]) * bits_per_logit[:, None]
    powers = torch.exp2(bits)
    slope = 1 if softcap is None else 1 - (capped / softcap).square()
    return TileStats(peak, powers.sum(-1), (powers * bits).sum(-1)), (powers * slope).bfloat16() if keep else None
