"""The Triton kernel of `lm_head.KeptHead`: all that happens to a tile of logits between two matrix products."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 16


def stats_and_powers(
    logits: Tensor, bias: Tensor | None, softcap: float | None, bits_per_logit: Tensor, *, keep: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """A tile's `TileStats`, and 2^bits in bfloat16, times the slope of the soft-cap, if asked for. `logits` [N, v] are
    float32 and contiguous, with v up to `lm_head.MAX_KEPT_WIDTH`: a program holds a row in registers.
    """
    # One program for each row, which holds all of its logits. Arguments that are not used are any pointer.
    num_tokens, width = logits.shape
    peak, power_sum, bits_sum = logits.new_empty(3, num_tokens)
    powers = torch.empty_like(logits, dtype=torch.bfloat16) if keep else None
    _kernel[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        bits_per_logit,
        peak,
        power_sum,
        bits_sum,
        logits if powers is None else powers,
        width,
        0.0 if softcap is None else softcap,
        HAS_BIAS=bias is not None,
        HAS_CAP=softcap is not None,
        KEEP=keep,
        BLOCK=max(128, 2 ** math.ceil(math.log2(width))),
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]
    )
    return (peak, power_sum, bits_sum), powers


@triton.jit
def _kernel(
    logits,
    bias,
    bits_per_logit,
    peaks,
    power_sums,
    bits_sums,
    kept,
    width,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The row's logits as the model means them: with bias, and capped.
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start = row.to(tl.int64) * width
    z = tl.load(logits + start + columns, mask=inside, other=float("-inf"))
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_CAP:
        z = softcap * (1 - 2 / (tl.exp(2 * z / softcap) + 1))  # tanh
        z = tl.where(inside, z, float("-inf"))

    # Its sums, relative to the largest of them; then the powers, for the backward pass.
    peak = tl.max(z, 0)
    bits = (z - peak) * tl.load(bits_per_logit + row)
    powers = tl.exp2(bits)
    tl.store(peaks + row, peak)
    tl.store(power_sums + row, tl.sum(powers, 0))
    tl.store(bits_sums + row, tl.sum(tl.where(inside, powers * bits, 0.0), 0))
    if KEEP:
        if HAS_CAP:
            powers *= 1 - (z / softcap) * (z / softcap)
        tl.store(kept + start + columns, powers.to(tl.bfloat16), mask=inside)
