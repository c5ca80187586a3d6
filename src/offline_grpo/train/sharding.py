"""How the processes of a run share weights, gradients and optimizer state: each holds a whole copy and they add up
gradients, or see fsdp2.py, or a class of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from offline_grpo.interfaces import Scorer
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks

T = TypeVar("T")


@dataclass
class Sharding:
    """Spreads nothing: every process has the whole policy and takes the same step. Subclasses divide it; all processes
    call every method.
    """

    ranks: Ranks

    def prepare(self, policy: Policy) -> None:
        """Spread the policy's parameters. Called once, before masters and optimizer are made from them."""

    def prepare_reference(self, reference: Scorer) -> None:
        """Spread the parameters of a frozen model."""

    def num_microbatches(self, own: int) -> int:
        """How many passes this process makes in an update for which it has `own` microbatches: at least `own`, and the
        same on all where a pass needs all processes; those beyond `own` count for nothing.
        """
        return own

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of all processes in place, as one message; a parameter that no token here reached gets
        zeros first.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum_([p.grad for p in parameters if p.grad is not None])

    def clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Scale the gradients so that their common L2 norm is at most `max_norm`. Returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def full_weights(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        """The whole of each parameter, by its name in the checkpoint. Called on rank 0 alone, in `lead`."""
        for name, parameter in policy.causal_lm.named_parameters():
            yield name, parameter.data

    def gathered(self, policy: Policy) -> AbstractContextManager[None]:
        """Inside, every process has the whole policy, and computes with it without the others."""
        return nullcontext()

    def lead(self, action: Callable[[], T], tensors: Any = None) -> T:
        """What `action` returns on rank 0, which alone runs it, on every process. A GrpoError there is raised on all.
        `tensors`: nested dicts and lists, which `action` gives to `whole`.
        """
        return self.ranks.on_main(action)

    def whole(self, tensors: T, folder: Path) -> T:
        """`tensors` of `lead` with whole tensors, whose memory may be files in `folder`. Called on rank 0 alone."""
        return tensors

    def like(self, target: Tensor, tensor: Tensor) -> Tensor:
        """Of a whole tensor, what this process holds of one that is spread as `target` is."""
        return tensor
