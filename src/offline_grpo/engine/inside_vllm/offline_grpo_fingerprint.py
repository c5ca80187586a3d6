"""Fingerprints of weights, computed alike by trainer and server: two that hold the same bits have the same."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK_ELEMENTS, CHUNK_ELEMENTS_CPU = 1 << 24, 1 << 18
"""What is added up at once: on GPUs what needs few launches, on CPUs what fits into a cache."""
ROW = 1024


def fingerprints(tensors: list[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on every bit of it and on its place; equal on CPUs and GPUs.

    The sum over the tensor's bytes, taken as 64-bit integers x[i], of x[i] * (2 i + 1), modulo 2**64. A tensor whose bytes are no
    multiple of 8 is taken as integers of its elements' size.
    """
    odd = {device: torch.arange(1, 2 * ROW, 2, device=device) for device in {tensor.device for tensor in tensors}}
    sums = [_fingerprint(tensor.detach(), odd[tensor.device]) for tensor in tensors]
    return [f"{total & (2**64 - 1):016x}" for total in (torch.stack(sums).tolist() if sums else [])]


def _fingerprint(tensor: Tensor, odd: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1)
    several = 8 // raw.element_size()
    if raw.numel() % several == 0:
        words = (raw.clone() if raw.storage_offset() % several else raw).view(torch.int64)  # 64 bits begin at multiples of 8 bytes alone
    else:
        words = raw.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[raw.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    size = CHUNK_ELEMENTS_CPU if raw.device.type == "cpu" else CHUNK_ELEMENTS
    for start in range(0, words.numel(), size):
        chunk = words[start : start + size].to(torch.int64)
        rest = -len(chunk) % ROW
        rows = (pad(chunk, (0, rest)) if rest else chunk).view(-1, ROW)  # i = place in the row + ROW * row + start: no products are stored
        first = torch.arange(2 * start, 2 * (start + rows.numel()), 2 * ROW, device=raw.device)
        total += (rows.sum(0) * odd).sum() + (rows.sum(1) * first).sum()
    return total
