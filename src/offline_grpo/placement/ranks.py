"""The processes of a run (`accelerate launch --num_processes N`), through accelerate. With one process every call here
is free.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor, distributed

from offline_grpo.errors import EngineDied, GrpoError

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""How long a process waits for the others, while the first one starts a server, say."""


class Ranks:
    """This process among the others. Rank 0 alone writes files (`is_main`)."""

    def __init__(self, *, use_cpu: bool) -> None:
        self._accelerator = Accelerator(cpu=use_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
        self.rank, self.local_rank = self._accelerator.process_index, self._accelerator.local_process_index
        self.world_size, self.is_main = self._accelerator.num_processes, self._accelerator.is_main_process
        # A process that ends in the group may abort: its threads still wait for messages of the others.
        atexit.register(lambda: distributed.destroy_process_group() if distributed.is_initialized() else None)

    def gather(self, share: Sequence[T]) -> list[T]:
        """The items of all processes, rank 0's first. Items must pickle."""
        if self.world_size == 1:
            return list(share)
        return gather_object(list(share))

    def gather_results(self, action: Callable[[], Sequence[T]]) -> list[T]:
        """The results of `action` on all processes, rank 0's first. A GrpoError of one process is raised on all: none
        waits for ever.
        """
        # An error travels as a value, so that all processes come to the end of this exchange.
        outcomes = self.gather([_attempt(action)])
        errors = [error for _, error in outcomes if error is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, EngineDied)), errors[0])
        return [item for items, _ in outcomes for item in items or ()]

    def gather_interleaved(self, action: Callable[[], Sequence[T]]) -> list[T]:
        """As `gather_results`, where `action` works on `items[rank::world_size]`; the results are in their order."""
        whole = self.gather_results(lambda: list(enumerate(action())))
        return [item for _, item in sorted(whole, key=lambda pair: pair[0])]  # stable: rank 0's first

    def neighbours(self, size: int) -> distributed.ProcessGroup:
        """The group of `size` consecutive processes, of which this one is; `size` divides the number of all."""
        return distributed.new_subgroups(size, timeout=PATIENCE)[0]  # type: ignore[return-value]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up `tensors` over all processes, in place and as one message."""
        if self.world_size == 1 or not tensors:
            return
        # Where the group can add: on the GPU for NCCL.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self._accelerator.device)
        flat = self._accelerator.reduce(flat, reduction="sum")
        assert isinstance(flat, Tensor)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every process."""
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        broadcast_object_list(values, from_process=0)
        return values[0]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on every process. A GrpoError there is raised on all."""
        result, error = self.broadcast(_attempt(action) if self.is_main else (None, None))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # rank 0 has one

    def first(self, value: T | None) -> T | None:
        """The value of the first process that has one; the same answer on all."""
        return next((found for found in self.gather([value]) if found is not None), None)


@contextmanager
def raise_on_peer_exit() -> Iterator[None]:
    """A GrpoError, in one line, where a message of another process does not come because that has ended."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises has no class of its own
        if not (isinstance(error, distributed.DistBackendError) or ("gloo" in str(error) and "peer" in str(error))):
            raise
        raise GrpoError(
            "another process of the run has ended, so this one ends too; its output says why; "
            "continue with resume=auto, which takes any number of processes"
        ) from error


def _attempt(action: Callable[[], T]) -> tuple[T | None, GrpoError | None]:
    try:
        return action(), None
    except GrpoError as error:
        return None, error
