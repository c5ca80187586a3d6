"""Problems that are made when they are asked for, of tasks that have them without end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from offline_grpo.types import Problem

MANY = 10**9
"""How many problems such a task says it has."""


@dataclass(frozen=True, slots=True)
class LazyProblems(Sequence[Problem]):
    """Problems made on demand: `make(i)` for each i of `indices`. Slices are lazy too."""

    make: Callable[[int], Problem]
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> LazyProblems: ...

    def __getitem__(self, index: int | slice) -> Problem | LazyProblems:
        if isinstance(index, slice):
            return LazyProblems(self.make, self.indices[index])
        return self.make(self.indices[index])
