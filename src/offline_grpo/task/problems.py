"""Problems that tasks make themselves: their messages, and sequences of problems without end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from offline_grpo.errors import require
from offline_grpo.types import Message, Problem

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


def check_system_prompt(system_prompt: str | None) -> None:
    """Raise ConfigError for one that says nothing."""
    fix = "is blank; set it to null to send no system message"
    require(system_prompt is None or bool(system_prompt.strip()), "task.system_prompt", repr(system_prompt), fix)


def prompt_key(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Equal for problems that ask the same."""
    return tuple((message["role"], message["content"]) for message in problem.messages)


def asked(prompt: str, system_prompt: str | None) -> tuple[Message, ...]:
    """The user's message, after the system message if there is one."""
    system: tuple[Message, ...] = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    return (*system, {"role": "user", "content": prompt})
