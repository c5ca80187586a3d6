"""Random groups of completions, once as padded trainers see them and once flat, for comparing losses with other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from offline_grpo.types import BatchTotals, TokenBatch, TokenStats

NUM_PROMPT_TOKENS = 2
GROUP_SIZE = 4


@dataclass(frozen=True)
class PaddedCase:
    """B completions of at most C tokens. `mask` has padding at the end, holes inside and one empty row; all tensors are
    float64.
    """

    lengths: list[int]  # B
    mask: Tensor  # [B, C] float64, 0 or 1
    rewards: Tensor  # [B], groups of GROUP_SIZE side by side
    logprobs: Tensor  # [B, C], a leaf with gradient, as is entropy
    entropy: Tensor  # [B, C]
    old_logprobs: Tensor  # [B, C], as are the next two
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    group_size: int = GROUP_SIZE
    max_new_tokens: int = 16

    def flat(self, advantages: Tensor) -> tuple[TokenStats, TokenBatch, BatchTotals]:
        """The same completions without padding, after prompts of two tokens; gradients reach the padded leaves.
        `advantages` is [B].
        """
        lengths = tuple(NUM_PROMPT_TOKENS + length for length in self.lengths)
        mask = self._flatten(self.mask)  # [T]
        batch = TokenBatch(
            token_ids=torch.zeros(sum(lengths), dtype=torch.long),
            position_ids=torch.cat([torch.arange(length) for length in lengths]),
            sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            completion_mask=mask.bool(),
            advantages=advantages.repeat_interleave(torch.tensor(lengths)) * mask,
            rollout_logprobs=self._flatten(self.rollout_logprobs) * mask,
            old_logprobs=self._flatten(self.old_logprobs) * mask,
            ref_logprobs=self._flatten(self.ref_logprobs) * mask,
            temperature=torch.ones(sum(lengths)),
            sequence_lengths=lengths,
            owners=tuple(range(len(lengths))),
        )
        policy = TokenStats(logprobs=self._flatten(self.logprobs) * mask, entropy=self._flatten(self.entropy) * mask)
        return policy, batch, BatchTotals(int(mask.sum()), len(lengths), self.max_new_tokens)

    def gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Of `loss` with respect to logprobs and entropy, both [B, C]."""
        grads = torch.autograd.grad(loss, (self.logprobs, self.entropy), allow_unused=True, materialize_grads=True)
        return grads[0], grads[1]

    def _flatten(self, padded: Tensor) -> Tensor:
        prompt = padded.new_zeros(NUM_PROMPT_TOKENS)
        return torch.cat([torch.cat([prompt, row[:length]]) for row, length in zip(padded, self.lengths, strict=True)])


@pytest.fixture(scope="session")
def padded_case() -> Callable[[int], PaddedCase]:
    """A function that makes a random `PaddedCase` from a seed; log-ratios have a spread of 0.4 nats, so clips and caps
    bind.
    """

    def make(seed: int, num_groups: int = 2) -> PaddedCase:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        num_sequences, width = num_groups * GROUP_SIZE, 9
        lengths = [width, *torch.randint(1, width + 1, (num_sequences - 1,), generator=generator).tolist()]
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).double()
        mask *= torch.rand(num_sequences, width, generator=generator) > 0.15
        mask[1] = 0.0
        old = -normal(num_sequences, width).abs() - 0.5
        return PaddedCase(
            lengths=lengths,
            mask=mask,
            rewards=normal(num_sequences),
            logprobs=(old + 0.4 * normal(num_sequences, width)).requires_grad_(),
            entropy=normal(num_sequences, width).abs().requires_grad_(),
            old_logprobs=old,
            rollout_logprobs=old + 0.4 * normal(num_sequences, width),
            ref_logprobs=old + 0.4 * normal(num_sequences, width),
        )

    return make
