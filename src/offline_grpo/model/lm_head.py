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

The backward pass computes the logits again: four matrix products in all instead of three, for a memory use that does
not grow with N * V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offline_grpo.errors import require
from offline_grpo.model import kept_head
from offline_grpo.model.kept_head import TileStats, locate, merge, tiles_of

CPU_TILE_BYTES = 8 * 2**20  # a tile and its scratch copy stay in the last-level cache
GPU_TILE_BYTES = 256 * 2**20  # large enough that the matrix products run at full speed
MIN_TILE_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class TiledHead:
    """The head described above, a `LossHead`.

    Args:
        tile_width: how many tokens v of the vocabulary a tile covers; None chooses it from the device and N, so
            that a tile has 8 MiB on the CPU and 256 MiB on a GPU, or 512 MiB where tiles are kept. It changes speed and
            memory only.
        kept_gib: GiB that a GPU keeps from the forward to the backward pass, so that less is computed again (see
            kept_head.py). For bfloat16 without an entropy bonus.
    """

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
        """Logprobs of `targets` and entropies, see `LossHead`. The logprob of a target outside [0, V) is NaN.

        The matrix products read `hidden`'s dtype. Logits and softmax are float32 whatever it is, or float64 if it is.
        """
        if self.kept_gib > 0 and not entropy_requires_grad and kept_head.runs_on(hidden):
            width = min(self.tile_width or kept_head.tile_width(len(hidden)), kept_head.MAX_WIDTH, len(weight))
            settings = (softcap, width, int(self.kept_gib * 2**30))
            return kept_head.KeptHead.apply(hidden, weight, bias, targets, temperature, *settings)
        return _TiledHead.apply(
            hidden, weight, bias, targets, temperature, softcap, entropy_requires_grad, self.tile_width
        )


class _Tile(NamedTuple):
    columns: slice  # which v of the V tokens
    weight: Tensor  # [v, H]
    logits: Tensor  # [N, v], before the temperature; overwritten by the next tile
    scratch: Tensor  # [N, v], likewise


def _tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, tile_width: int | None
) -> Iterator[_Tile]:
    dtype, num_tokens = _stats_dtype(hidden), len(hidden)
    full_width = _tile_width(tile_width, num_tokens, len(weight), dtype.itemsize, hidden.device)
    logits_buffer, scratch_buffer = torch.empty(2, num_tokens * full_width, dtype=dtype, device=hidden.device)
    for columns in tiles_of(len(weight), full_width):
        width = columns.stop - columns.start
        tile = _Tile(
            columns,
            weight[columns].to(hidden.dtype),
            logits_buffer[: num_tokens * width].view(num_tokens, width),
            scratch_buffer[: num_tokens * width].view(num_tokens, width),
        )
        _matmul_into(tile.logits, hidden, tile.weight.T)
        if bias is not None:
            tile.logits.add_(bias[columns])
        if softcap is not None:
            tile.logits.div_(softcap).tanh_().mul_(softcap)
        yield tile


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
        entropy_requires_grad: bool,
        tile_width: int | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = _stats_dtype(hidden)
        bits_per_logit = 1 / (math.log(2) * temperature.to(dtype))  # [N]
        target_logits = torch.full_like(bits_per_logit, torch.nan)  # [N]
        tile_stats: list[TileStats] = []
        for tile in _tiles(_matmul_input(hidden), weight, bias, softcap, tile_width):
            index, inside = locate(targets, tile.columns)
            target_logits = torch.where(inside, tile.logits[index], target_logits)
            peak = tile.logits.amax(-1)  # [N]
            bits = tile.logits.sub_(peak[:, None]).mul_(bits_per_logit[:, None])  # [N, v], <= 0
            powers = torch.exp2(bits, out=tile.scratch)
            tile_stats.append(TileStats(peak, powers.sum(-1), powers.mul_(bits).sum(-1)))

        (peak, power_sum, bits_sum), _ = merge(tile_stats, bits_per_logit)
        logprobs = (target_logits - peak) / temperature - power_sum.log()
        entropy = power_sum.log() - math.log(2) * bits_sum / power_sum
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, bits_per_logit, peak, power_sum, entropy)
        ctx.softcap, ctx.tile_width = softcap, tile_width
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
        for tile in _tiles(inputs, weight, bias, ctx.softcap, ctx.tile_width):
            slope_of_cap = None if ctx.softcap is None else 1 - (tile.logits / ctx.softcap).square_()  # [N, v]
            bits = tile.logits.sub_(peak[:, None]).mul_(bits_per_logit[:, None])  # [N, v]
            grad_logits = torch.exp2(bits, out=tile.scratch)  # [N, v]
            grad_logits.mul_(offset[:, None] if slope is None else bits.mul_(slope[:, None]).add_(offset[:, None]))
            index, inside = locate(targets, tile.columns)
            grad_logits[index] += torch.where(inside, target_grad, 0)  # one element per row: no two writes meet
            if slope_of_cap is not None:
                grad_logits.mul_(slope_of_cap)
            if grad_bias is not None:
                grad_bias[tile.columns] = grad_logits.sum(0)
            grad_logits = grad_logits.to(inputs.dtype)
            if grad_hidden is not None:
                _add_matmul_to(grad_hidden, grad_logits, tile.weight)
            if grad_weight is not None:
                _matmul_into(grad_weight[tile.columns], grad_logits.T, inputs)
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


def _stats_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _tile_width(width: int | None, num_tokens: int, vocab_size: int, stats_bytes: int, device: torch.device) -> int:
    """`width`, or what `TiledHead` chooses where it is None; at most the vocabulary."""
    if width is None:
        budget_bytes = CPU_TILE_BYTES if device.type == "cpu" else GPU_TILE_BYTES
        width = budget_bytes // (max(num_tokens, 1) * stats_bytes)
        width = max(width // MIN_TILE_WIDTH * MIN_TILE_WIDTH, MIN_TILE_WIDTH)
    return min(width, vocab_size)


def _matmul_input(hidden: Tensor) -> Tensor:
    """`hidden` in the dtype to multiply in. Only CUDA multiplies 16-bit matrices into float32; elsewhere widening gives
    the same logits.
    """
    return hidden if hidden.is_cuda else hidden.to(_stats_dtype(hidden))


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, accumulated in float32 or wider and rounded to `out`'s dtype once."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and a.dtype.itemsize < out.dtype.itemsize:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a @ b)


def _add_matmul_to(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in `out`'s dtype: a product rounded to 16 bits before every addition would bias the sum."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
