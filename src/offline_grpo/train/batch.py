"""From scored rollouts to flat token batches, and from a batch to the microbatches of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from offline_grpo.types import BatchTotals, FinishReason, Rollout, TokenBatch


def build_batch(rollouts: Sequence[Rollout], *, mask_truncated: bool) -> TokenBatch:
    """Lay S rollouts end to end, on the CPU; advantages are 0 until `with_advantages`, and `ref_logprobs` and
    `teacher_logprobs` None unless all have some. `mask_truncated` leaves rollouts that hit the length limit out of the
    loss.
    """
    lengths = [len(r.token_ids) for r in rollouts]
    sequence_ids = np.repeat(np.arange(len(rollouts)), lengths)  # [T]
    starts = np.cumsum([0, *lengths])[:-1]  # [S]
    is_trained = np.array([not (mask_truncated and r.finish_reason is FinishReason.LENGTH) for r in rollouts])
    completion_mask = _flat((r.is_sampled for r in rollouts), np.bool_) & is_trained[sequence_ids]  # [T]
    zeros = np.zeros(len(sequence_ids), np.float32)
    arrays = {
        "token_ids": _flat((r.token_ids for r in rollouts), np.int64),
        "position_ids": np.arange(len(sequence_ids)) - starts[sequence_ids],
        "sequence_ids": sequence_ids,
        "completion_mask": completion_mask,
        "advantages": zeros,
        "rollout_logprobs": np.where(completion_mask, _flat((r.logprobs for r in rollouts), np.float32), zeros),
        "old_logprobs": zeros,
        "temperature": np.array([r.temperature for r in rollouts], np.float32)[sequence_ids],
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def given(rows: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
        found = [row for row in rows if row is not None]
        complete = len(found) == len(rows)
        return torch.from_numpy(np.where(completion_mask, _flat(found, np.float32), zeros)) if complete else None

    return TokenBatch(
        **tensors,
        ref_logprobs=given([r.ref_logprobs for r in rollouts]),
        teacher_logprobs=given([r.teacher_logprobs for r in rollouts]),
        sequence_lengths=tuple(lengths),
    )


def with_advantages(batch: TokenBatch, advantages: Sequence[float | Sequence[float]]) -> TokenBatch:
    """The batch with the advantages of S sequences: one number for all tokens of a sequence, or one for each."""
    per_token = [
        torch.full((length,), own) if isinstance(own, float) else torch.tensor(own, dtype=torch.float32)
        for own, length in zip(advantages, batch.sequence_lengths, strict=True)
    ]
    return replace(batch, advantages=torch.cat(per_token) * batch.completion_mask)


def _flat(sequences: Iterable[Iterable[float]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """Of a list, `torch.tensor` takes eight times as long, for which a GPU would wait."""
    with np.errstate(over="ignore"):  # what is not trained may have any number, such as 1e300
        return np.fromiter(chain.from_iterable(sequences), dtype)


def totals_of(batch: TokenBatch, sequences: Sequence[int], *, max_new_tokens: int) -> BatchTotals:
    """The denominators of an optimizer batch made of these sequences, whichever process trains them."""
    num_tokens = int(np.count_nonzero(batch.completion_mask.numpy()[batch.positions_of(sequences)]))
    return BatchTotals(num_completion_tokens=num_tokens, num_sequences=len(sequences), max_new_tokens=max_new_tokens)


def split_updates(num_sequences: int, *, num_updates: int | None, sequences_per_update: int | None) -> list[range]:
    """Consecutive, nearly equal runs of sequences, one for each update of a pass; exactly one of the two sizes is
    given.

    Example: split_updates(5, num_updates=2, sequences_per_update=None) -> [range(0, 3), range(3, 5)].
    """
    if sequences_per_update is not None:
        num_updates = -(-num_sequences // sequences_per_update)
        bounds = [min(i * sequences_per_update, num_sequences) for i in range(num_updates + 1)]
    else:
        assert num_updates is not None
        num_updates = min(num_updates, num_sequences)
        bounds = [-(-i * num_sequences // num_updates) for i in range(num_updates + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def share_of_rank(sequences: Sequence[int], lengths: Sequence[int], *, rank: int, world_size: int) -> list[int]:
    """The sequences that this process trains, longest first: each goes to the process with the fewest tokens so far,
    which has at most 4/3 of the tokens of the best division (Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, r) for r in range(world_size)]
    for s in sorted(sequences, key=lambda s: (-lengths[s], s)):
        tokens, least = loads[0]
        shares[least].append(s)
        heapreplace(loads, (tokens + lengths[s], least))
    return shares[rank]


def microbatches(
    sequences: Sequence[int], lengths: Sequence[int], *, batch_size: int | None, max_tokens: int | None, padded: bool
) -> list[list[int]]:
    """Cut sequences, sorted by length so that rows of one microbatch pad little, into microbatches of so many sequences
    or of so many tokens, padding included where `padded`. A longer sequence gets a microbatch of its own.
    """
    result: list[list[int]] = []
    size = 0  # tokens of the current microbatch
    for s in sequences:
        if batch_size is not None:
            is_full = not result or len(result[-1]) == batch_size
        else:
            assert max_tokens is not None
            longest = lengths[result[-1][0]] if result and padded else lengths[s]
            grown = longest * (len(result[-1]) + 1) if result and padded else size + lengths[s]
            is_full = not result or grown > max_tokens
        if is_full:
            result.append([])
            size = 0
        result[-1].append(s)
        size += lengths[s]
    return result
