"""Fingerprints of weights, computed alike by trainer and server: two that hold the same bits have the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

BATCH_WORDS, BATCH_WORDS_CPU = 1 << 23, 1 << 18
"""What is added up at once: on GPUs what needs few launches, on CPUs what fits into a cache."""
ROW = 1024


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
    owners: list[int] = []
    number, size = 0, 0
    for number, (tensor, first) in enumerate(parts, 1):
        words = _words(tensor.detach())
        limit = BATCH_WORDS_CPU if words.device.type == "cpu" else BATCH_WORDS
        for start in range(0, len(words), limit):
            piece = words[start : start + limit]
            if batch and size + len(piece) > limit:
                found.append(_totals(batch))
                batch, size = [], 0
            batch.append((piece, first + start))
            owners.append(number - 1)
            size += len(piece) + ROW
    if not owners:
        return torch.zeros(number, dtype=torch.int64)
    of_pieces = torch.cat([*found, _totals(batch)])
    to = _sent(owners, of_pieces.device)
    return torch.zeros(number, dtype=torch.int64, device=of_pieces.device).index_add_(0, to, of_pieces)


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


def _totals(pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
    """[N] int64, of few calls: on a GPU, each takes longer than the sum over a usual tensor.

    The words lie in rows [R, ROW] of one table, i = ROW * row + column, those of each piece in rows of its own.
    """
    words = [piece for piece, _ in pieces]
    device, skips = words[0].device, [first % ROW for _, first in pieces]
    rows = [-(-(skip + len(piece)) // ROW) for piece, skip in zip(words, skips, strict=True)]
    table = torch.zeros(sum(rows), ROW, dtype=torch.int64, device=device)
    areas = [area[skip:] for area, skip in zip(table.view(-1).split([n * ROW for n in rows]), skips, strict=True)]
    places = [area[: len(piece)] for area, piece in zip(areas, words, strict=True)]
    torch._foreach_copy_(places, words)  # pyright: ignore[reportPrivateImportUsage]
    begins = [sum(rows[:n]) - first // ROW for n, (_, first) in enumerate(pieces)]
    begin, counts = _sent([begins, rows], device)
    owner = torch.repeat_interleave(torch.arange(len(rows), device=device), counts, output_size=len(table))  # [R]
    row = torch.arange(len(table), device=device) - begin[owner]  # [R]
    columns = torch.arange(1, 2 * ROW, 2, device=device)
    of_rows = (table * columns).sum(1) + table.sum(1) * row * (2 * ROW)
    return torch.zeros(len(rows), dtype=torch.int64, device=device).index_add_(0, owner, of_rows)


def _sent(numbers: list[Any], device: torch.device) -> Tensor:
    """Numbers on a device, which this does not wait for."""
    found = torch.tensor(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
