"""How processes share the work on the policy. Today each holds a whole copy, and they add up gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks


@dataclass(frozen=True)
class Replicas:
    """A `Sharding` that spreads nothing: every process has the whole policy and takes the same optimizer step."""

    ranks: Ranks

    def prepare(self, policy: Policy) -> None:
        """See `Sharding.prepare`. Every process has loaded the same weights."""

    def num_microbatches(self, own: int) -> int:
        """See `Sharding.num_microbatches`. A pass needs no other process."""
        return own

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """See `Sharding.reduce_gradients`. One message for all."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum_([p.grad for p in parameters if p.grad is not None])

    def clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """See `Sharding.clip_gradients`."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def full_weights(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        """See `Sharding.full_weights`."""
        for name, parameter in policy.causal_lm.named_parameters():
            yield name, parameter.data
