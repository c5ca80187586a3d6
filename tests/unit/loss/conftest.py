"""Small flat batches for the tests of the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from factories import LOSS, make_batch
from torch import Tensor

from offline_grpo.types import BatchTotals, TokenBatch, TokenStats

Inputs = tuple[TokenStats, TokenBatch, BatchTotals]


@pytest.fixture(scope="session")
def plain() -> dict[str, Any]:
    """Settings of a loss that is its policy-gradient term alone; `dual_clip` only fits the clipped losses."""
    return {name: value for name, value in LOSS.items() if name != "dual_clip"} | {"entropy_coef": 0.0}


@pytest.fixture(scope="session")
def random_inputs() -> Callable[..., Inputs]:
    """A function that makes a random float64 batch: prompts of 1 to 3 tokens, masked holes, and one sequence masked
    altogether.
    """

    def make(seed: int = 0, num_sequences: int = 6) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (num_sequences,), generator=generator).tolist()
        sequence_ids = torch.repeat_interleave(torch.arange(num_sequences), torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        mask = (
            (positions > sequence_ids % 3)
            & (torch.rand(len(positions), generator=generator) > 0.1)
            & (sequence_ids != 2)
        )

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        old = -normal(len(mask)).abs() * mask
        batch = make_batch(
            lengths,
            mask,
            normal(num_sequences),
            old,
            token_ids=torch.randint(0, 50, (len(mask),), generator=generator),
            rollout_logprobs=(old + 0.4 * normal(len(mask))) * mask,
            ref_logprobs=(old + 0.4 * normal(len(mask))) * mask,
        )
        logprobs = (old + 0.4 * normal(len(mask)) * mask).requires_grad_()
        entropy = (normal(len(mask)).abs() * mask).requires_grad_()
        return TokenStats(logprobs, entropy), batch, BatchTotals(int(mask.sum()), num_sequences, max_new_tokens=16)

    return make


@pytest.fixture(scope="session")
def completions() -> Callable[..., Inputs]:
    """A function that makes the batch of completions (without prompts) with these ratios to the old policy, whose
    logprobs are -1.
    """

    def make(ratios: Sequence[Sequence[float]], advantages: Sequence[float], **tensors: Tensor) -> Inputs:
        lengths = tuple(len(sequence) for sequence in ratios)
        ratio = torch.tensor([r for sequence in ratios for r in sequence], dtype=torch.float64)
        old = -torch.ones_like(ratio)
        everything = torch.ones(len(ratio), dtype=torch.bool)
        batch = make_batch(lengths, everything, torch.tensor(advantages, dtype=torch.float64), old, **tensors)
        policy = TokenStats((old + ratio.log()).requires_grad_(), torch.zeros_like(ratio))
        return policy, batch, BatchTotals(len(ratio), len(lengths), max_new_tokens=8)

    return make
