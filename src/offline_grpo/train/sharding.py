"""How processes share the work on the policy: each holds a whole copy and they add up gradients, or see fsdp2.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks

T = TypeVar("T")


@dataclass
class Replicas:
    """An `interfaces.Sharding` that spreads nothing: every process has the whole policy and takes the same step."""

    ranks: Ranks

    def prepare(self, policy: Policy) -> None:
        """Every process has loaded the same weights."""

    def prepare_reference(self, reference: Any) -> None:
        """Each has its own."""

    def num_microbatches(self, own: int) -> int:
        """A pass needs no other process."""
        return own

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """One message for all."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum_([p.grad for p in parameters if p.grad is not None])

    def clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def full_weights(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in policy.causal_lm.named_parameters():
            yield name, parameter.data

    def gathered(self, policy: Policy) -> AbstractContextManager[None]:
        return nullcontext()

    def lead(self, action: Callable[[], T], tensors: Any = None) -> T:
        return self.ranks.on_main(action)

    def whole(self, tensors: T, folder: Path) -> T:
        return tensors

    def like(self, target: Tensor, tensor: Tensor) -> Tensor:
        return tensor
