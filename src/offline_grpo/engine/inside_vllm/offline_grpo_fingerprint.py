"""Fingerprints of weights, computed alike by trainer and server: two that hold the same bits have the same."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22


def fingerprints(tensors: list[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on every bit of it and on its place; equal on CPUs and GPUs.

    The sum over the tensor's bytes, taken as 32-bit integers x[i], of x[i] * (2 i + 1), modulo 2**64.
    """
    sums = [_fingerprint(tensor.detach()) for tensor in tensors]
    return [f"{total & (2**64 - 1):016x}" for total in (torch.stack(sums).tolist() if sums else [])]


def _fingerprint(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1)
    if raw.element_size() == 2 and raw.numel() % 2 == 0:
        words = (raw.clone() if raw.storage_offset() % 2 else raw).view(torch.int32)  # 32 bits begin at even places alone
    else:
        words = raw.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), CHUNK_ELEMENTS):
        chunk = words[start : start + CHUNK_ELEMENTS].to(torch.int64)
        place = torch.arange(start, start + len(chunk), dtype=torch.int64, device=raw.device)
        total += (chunk * (2 * place + 1)).sum()
    return total
