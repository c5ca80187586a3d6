"""The loss head of GPUs that compute in bfloat16: as lm_head.py, but what a tile needs for its gradient is kept, and
not computed again.

With z the logits of a row, T its temperature and S the sum over the vocabulary of exp((z - max z) / T), a tile keeps

    powers = exp((z - peak) / T), with the tile's own largest logit for the peak: [N, v] in bfloat16

so that the gradient of the logits, without an entropy term, is powers times a number for each row and tile. That number
goes to the other factor of both matrix products. So there are three products instead of four, and nothing of [N, v] is
written in the backward pass but one element per row: the target's, (1 - p) / T, which would lose its digits as the
difference of two rounded numbers.

On a GPU one kernel (head_kernel.py) does all that happens between the products. Tiles beyond `kept_bytes` keep nothing
and are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offline_grpo.model.compiling import is_compiled_by_default

TILE_BYTES = 512 * 2**20
MAX_WIDTH = 16384
"""The kernel holds a row of a tile in registers."""
MIN_SHIFT = -60.0
"""In bits: a tile whose peak lies this far below the row's adds nothing to the row but its target. Keeps scaled numbers
in range.
"""


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


def runs_on(hidden: Tensor) -> bool:
    """Whether this head is the one for `hidden`."""
    return hidden.dtype == torch.bfloat16 and is_compiled_by_default(hidden.device)


def tile_width(num_tokens: int) -> int:
    """Tokens of the vocabulary in a tile of float32 logits."""
    return min(MAX_WIDTH, max(TILE_BYTES // (4 * max(num_tokens, 1)) // 256 * 256, 256))


def num_kept(num_tokens: int, vocab_size: int, width: int, kept_bytes: int) -> int:
    """How many of the tiles are kept."""
    return min(-(-vocab_size // width), kept_bytes // (2 * max(num_tokens, 1) * width))


class KeptHead(torch.autograd.Function):
    """Logprobs and entropies, see `LossHead`; the entropy carries no gradient.

    Args of `apply`: hidden [N, H], weight [V, H], bias [V] or None, targets [N], temperature [N], softcap, tile width,
    kept bytes.
    """

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
        limit = num_kept(len(hidden), len(weight), width, kept_bytes) if keeps else 0
        kept: list[Tensor | None] = []
        stats: list[TileStats] = []
        target_logits = torch.full_like(bits_per_logit, torch.nan)  # [N]
        buffer = _buffer(hidden, width)
        for columns in tiles_of(len(weight), width):
            logits = _logits(buffer, hidden, weight[columns])  # [N, v]
            tile_bias = None if bias is None else bias[columns]
            index, inside = locate(targets, columns)
            here = _capped(logits[index], None if bias is None else bias[targets], softcap)
            target_logits = torch.where(inside, here, target_logits)
            found, powers = _stats_and_powers(logits, tile_bias, softcap, bits_per_logit, keep=len(kept) < limit)
            stats.append(found)
            kept.append(powers)
        merged, shifts = merge(stats, bits_per_logit)
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
        hidden, weight, bias, targets, temperature, bits_per_logit, target_logits, logprobs, power_sum, shifts = (
            ctx.saved_tensors
        )
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = (
            torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        )  # [N, H], a sum over tiles
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        slope = grad_outputs[0] / temperature  # [N], of the target's logit
        slope_of_cap = 1.0 if ctx.softcap is None else 1 - (target_logits / ctx.softcap).square()
        target = torch.expm1(logprobs) * power_sum * slope_of_cap  # [N], (p - 1) S
        buffer = None
        for number, columns in enumerate(tiles_of(len(weight), ctx.width)):
            powers, ctx.kept[number] = ctx.kept[number], None  # [N, v]
            if powers is None:
                buffer = _buffer(hidden, ctx.width) if buffer is None else buffer
                logits = _logits(buffer, hidden, weight[columns])
                tile_bias = None if bias is None else bias[columns]
                _, powers = _stats_and_powers(logits, tile_bias, ctx.softcap, bits_per_logit, keep=True)
                assert powers is not None
            shift = shifts[number].clamp(min=MIN_SHIFT)  # [N]
            index, inside = locate(targets, columns)
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


def _buffer(hidden: Tensor, width: int) -> Tensor:
    return torch.empty(len(hidden) * width, dtype=torch.float32, device=hidden.device)


def _logits(buffer: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, v] in float32, without bias and soft-cap."""
    return _product(hidden, weight.T, out=buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight)))


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in float32. Only CUDA multiplies 16-bit matrices into it; elsewhere, in tests, they are widened first."""
    if not a.is_cuda:
        return torch.mm(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32) if out is None else torch.mm(a, b, out_dtype=torch.float32, out=out)


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
