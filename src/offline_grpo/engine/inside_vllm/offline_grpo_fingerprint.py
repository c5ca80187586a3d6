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

    The sum over the tensor's bytes, taken as 64-bit integers x[i], of x[i] * (2 i + 1), modulo 2**64. A tensor whose
    bytes are no multiple of 8 is taken as integers of its elements' size.
    """
    places = {
        device: torch.arange(0, 2 * CHUNK_ELEMENTS // ROW, 2, device=device)
        for device in {tensor.device for tensor in tensors}
    }
    sums = [_fingerprint(tensor.detach(), places[tensor.device]) for tensor in tensors]
    return [f"{total & (2**64 - 1):016x}" for total in (torch.stack(sums).tolist() if sums else [])]


def sums(tensors: list[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on its numbers and not on their order: the sum of their bits, taken as
    integers.
    """
    of_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = [tensor.detach().view(of_size[tensor.element_size()]).sum() for tensor in tensors]
    return [f"{int(total) & (2**64 - 1):016x}" for total in found]


def _fingerprint(tensor: Tensor, places: Tensor) -> Tensor:
    """[] int64. Of few calls: on a GPU, each takes longer than the sum over a usual tensor.

    Args:
        places: 0, 2, 4, ...
    """
    raw = tensor.contiguous().view(-1)
    several = 8 // raw.element_size()
    if raw.numel() % several == 0:
        # 64 bits begin at multiples of 8 bytes alone
        words = (raw.clone() if raw.storage_offset() % several else raw).view(torch.int64)
    else:
        words = raw.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[raw.element_size()])
    size = CHUNK_ELEMENTS_CPU if raw.device.type == "cpu" else CHUNK_ELEMENTS
    if words.numel() <= size:
        return _sum(words, places)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start, chunk in zip(range(0, words.numel(), size), words.split(size), strict=True):
        total += _sum(chunk, places) + 2 * start * chunk.sum()
    return total


def _sum(words: Tensor, places: Tensor) -> Tensor:
    """The sum of x[i] * (2 i + 1). With i = ROW * row + column it is one over columns and one over rows, without a
    product per word.
    """
    words = words.to(torch.int64)
    if words.numel() <= ROW:
        return (words * (places[: len(words)] + 1)).sum()
    if rest := -len(words) % ROW:
        words = pad(words, (0, rest))
    rows = words.view(-1, ROW)
    columns, sums = rows.sum(0), rows.sum(1)
    return (columns * (places[:ROW] + 1)).sum() + (sums * places[: len(sums)]).sum() * ROW
