"""Fingerprints of weights, computed alike by trainer and server: two that hold the same bits have the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module

import torch
from torch import Tensor

BATCH_WORDS, PIECE_WORDS = 1 << 25, 1 << 18
"""What is added up at once: on GPUs what a launch gets, of which some may be copies; on CPUs what fits into a cache."""


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on every bit of it and on its place; equal on CPUs and GPUs.

    The sum over the tensor's bytes, taken as 64-bit integers x[i], of x[i] * (2 i + 1), modulo 2**64. A tensor whose
    bytes are no multiple of 8 is taken as integers of its elements' size.
    """
    return texts(totals((tensor, 0) for tensor in tensors))


def texts(totals: Tensor) -> list[str]:
    """Fingerprints as they are written: 16 hexadecimal digits each."""
    return [f"{total & (2**64 - 1):016x}" for total in totals.tolist()]


def totals(parts: Iterable[tuple[Tensor, int]]) -> Tensor:
    """[N] int64: the sums of `fingerprints`, on the tensors' device, which this does not wait for.

    Args:
        parts: tensors, and i of the first word of each: where a part of a tensor begins in all of it. The sums of all
            parts add up to that of the tensor.
    """
    found: list[Tensor] = []
    batch: list[tuple[Tensor, int]] = []
    size = 0
    for tensor, first in parts:
        words = _words(tensor.detach())
        if batch and size + len(words) > BATCH_WORDS:
            found.append(_totals(batch))
            batch, size = [], 0
        batch.append((words, first))
        size += len(words)
    return torch.cat([*found, _totals(batch)]) if batch else torch.zeros(0, dtype=torch.int64)


def as_part(tensor: Tensor, dim: int, start: int, whole: int) -> tuple[Tensor, int]:
    """What `totals` takes of `whole` rows or columns (`dim`) those from `start` on: zeros stand in for the others where
    these are no run of whole words.
    """
    if len(tensor) == 0 or tensor.shape[dim] == whole:
        return tensor, 0
    row_bytes = tensor[0].nbytes
    if dim == 0 and all(rows * row_bytes % 8 == 0 for rows in (start, len(tensor), whole)):
        return tensor, start * row_bytes // 8
    shape = [*tensor.shape[:dim], whole, *tensor.shape[dim + 1 :]]
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return padded, 0


def sums(tensors: Sequence[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on its numbers and not on their order: the sum of their bits, taken as
    integers.
    """
    of_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = [tensor.detach().view(of_size[tensor.element_size()]).sum() for tensor in tensors]
    return texts(torch.stack(found)) if found else []


def _words(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1)
    several = 8 // raw.element_size()
    if raw.numel() % several == 0:
        # 64 bits begin at multiples of 8 bytes alone
        return (raw.clone() if raw.storage_offset() % several else raw).view(torch.int64)
    return raw.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[raw.element_size()])


def _totals(batch: Sequence[tuple[Tensor, int]]) -> Tensor:
    """[N] int64."""
    if batch[0][0].is_cuda:
        return import_module(f"{__name__}_kernel").add_up(batch)  # needs Triton
    odd = torch.arange(1, 2 * PIECE_WORDS, 2)
    found = torch.zeros(len(batch), dtype=torch.int64)
    for total, (words, first) in zip(found, batch, strict=True):
        for number, piece in enumerate(words.split(PIECE_WORDS)):
            total += (piece * odd[: len(piece)]).sum() + piece.sum() * (2 * (first + number * PIECE_WORDS))
    return found
