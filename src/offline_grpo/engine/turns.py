"""Which servers may start at the same time: those that share no GPU.

While a vLLM server starts, it measures how much memory it takes, and takes for its own what another one allocates
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class OnGpus(Protocol):
    """A server or its engine."""

    @property
    def gpus(self) -> Sequence[int] | None:
        """Those that it may see; None: all, or none, as single servers and those on CPUs have."""
        ...


T = TypeVar("T", bound=OnGpus)


def next_to_start(waiting: Iterable[T], starting: Iterable[OnGpus] = ()) -> list[T]:
    """Those that may start beside each other and beside those that start already."""
    taken = {gpu for server in starting for gpu in server.gpus or ()}
    chosen = []
    for server in waiting:
        gpus = set(server.gpus or ())
        if not gpus & taken:
            chosen.append(server)
            taken |= gpus
    return chosen
