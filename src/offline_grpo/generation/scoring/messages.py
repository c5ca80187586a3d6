"""What the processes of scoring say to each other: pickles, each after its length, towards those that score, and lines
of JSON back.

Nothing that comes from a process with foreign code in it is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.types import Problem

if TYPE_CHECKING:
    from offline_grpo.interfaces import Task
    from offline_grpo.settings import ScoringConfig

LINE_BYTES = 2**20
"""The longest answer; a score with more in it is refused."""


@dataclass(frozen=True)
class Setup:
    """What those that score are told first."""

    make_task: bytes  # a pickled function; only workers may import what it needs
    preload: tuple[str, ...]  # modules that are imported once for all workers
    num_workers: int
    timeout_s: float
    memory_bytes: int
    printed: Path | None  # the file for what foreign code prints

    @classmethod
    def of(
        cls, make_task: Callable[[], Task], settings: ScoringConfig, *, preload: Sequence[str], printed: Path | None
    ) -> Setup:
        """For the settings of a run.

        Args:
            make_task: makes the task in a worker; picklable.
            preload: modules that are imported once for all workers; none of a user's own.
            printed: the file that gets what foreign code prints; None: nothing is kept.
        """
        memory_bytes = settings.memory_mib * 2**20
        return cls(pickle.dumps(make_task), tuple(preload), settings.workers, settings.timeout_s, memory_bytes, printed)


@dataclass(frozen=True)
class Request:
    """One completion to score. `number` comes back with the answer."""

    number: int
    problem: Problem
    text: str


def frame(message: object) -> bytes:
    """A message on its way to a process that scores."""
    body = pickle.dumps(message)
    return len(body).to_bytes(8, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises asyncio.IncompleteReadError where the other side has gone."""
    size = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(size))


def line(answer: Mapping[str, Any]) -> bytes:
    """An answer on its way back."""
    return json.dumps(answer).encode() + b"\n"


def failed(failure: str, reason: str, trace: str = "") -> dict[str, Any]:
    """The answer in place of a score."""
    return {"failure": failure, "reason": reason, "traceback": trace}


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next answer; None where the other side has gone, or says what is no answer."""
    try:
        answer = json.loads(await reader.readuntil(b"\n"))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
