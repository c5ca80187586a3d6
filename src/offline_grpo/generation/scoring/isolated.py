"""A task whose completions are scored in processes that can be killed."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from offline_grpo.errors import ScoreError
from offline_grpo.generation.judging import about_completion
from offline_grpo.generation.scoring.messages import LINE_BYTES, Request, Setup, frame, read_line
from offline_grpo.interfaces import Task
from offline_grpo.settings import ScoringConfig
from offline_grpo.types import Problem, Score, Split

CLOSE_S = 15.0

log = logging.getLogger(__name__)


class IsolatedTask:
    """A `Task` like `task`, whose `score` is async and asks a process below which workers do the scoring (see `host.py`).

    Code that takes longer than `timeout_s`, needs more than `memory_mib`, ends its process or raises costs a score of 0 that says so
    (`Score.failure`); of each cause the first one is told.

    Args:
        make_task: makes the same task in a worker; picklable.
        preload: modules that are imported once for all workers; none of a user's own.
        printed: the file that gets what foreign code prints; None: nothing is kept.
    """

    def __init__(
        self, task: Task, make_task: Callable[[], Task], settings: ScoringConfig, *, preload: Sequence[str], printed: Path | None
    ) -> None:
        self._task, self._settings = task, settings
        self._setup = Setup(
            make_task=pickle.dumps(make_task),
            preload=tuple(preload),
            num_workers=settings.workers,
            timeout_s=settings.timeout_s,
            memory_bytes=settings.memory_mib * 2**20,
            printed=printed,
        )
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._connection: asyncio.Task[asyncio.StreamWriter] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._broken: ScoreError | None = None
        self._told: set[str] = set()
        self._socket, theirs = socket.socketpair()
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; from offline_grpo.generation.scoring.host import main; main()"
            nowhere = subprocess.DEVNULL
            self._host = subprocess.Popen(
                [sys.executable, "-c", code], stdin=theirs.fileno(), stdout=nowhere, stderr=nowhere, start_new_session=True
            )

    def problems(self, split: Split) -> Sequence[Problem]:
        """See `Task.problems`."""
        return self._task.problems(split)

    async def score(self, problem: Problem, text: str) -> Score:
        """See `Task.score`.

        Raises:
            ScoreError: no worker can make the task, or the process above them has ended.
        """
        self._connection = self._connection or asyncio.create_task(self._connect())
        writer = await asyncio.shield(self._connection)
        if self._broken is not None:
            raise self._broken
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        writer.write(frame(Request(number, problem, text)))
        try:
            answer = await future
        finally:
            self._waiting.pop(number, None)
        if failure := answer.get("failure"):
            self._tell(failure, answer, problem, text)
            return Score(0.0, False, {}, failure)
        return Score(answer["reward"], answer["is_correct"], answer["parts"], measured=answer["measured"])

    def close(self) -> None:
        """End all processes of it."""
        with suppress(OSError):  # the host has gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._connection is None:
            self._socket.close()
        try:
            self._host.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._host.kill()  # its workers die with it
            self._host.wait()

    async def _connect(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._socket, limit=LINE_BYTES)
        writer.write(frame(self._setup))
        self._listening = asyncio.create_task(self._listen(reader, writer))
        return writer

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (answer := await read_line(reader)) is not None:
            if "broken" in answer:
                break
            if (future := self._waiting.get(answer["number"])) is not None and not future.done():
                future.set_result(answer)
        writer.close()
        reason = answer["broken"] if answer is not None else "the process that starts them has ended"
        trace = f"\n{answer['traceback']}" if answer and answer["traceback"] else ""
        memory = f"scoring.memory_mib={self._settings.memory_mib} may be too little for what they import"
        self._broken = ScoreError(f"the processes that score do not work: {reason}; {memory}; scoring.workers=0 needs none{trace}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._broken)

    def _tell(self, failure: str, answer: dict[str, Any], problem: Problem, text: str) -> None:
        """The first one of each cause, as loud as a warning is."""
        if failure in self._told:
            return
        self._told.add(failure)
        what = {
            "timeout": f"took more than {self._settings.timeout_s:g} s (scoring.timeout_s)",
            "memory": f"needed more than {self._settings.memory_mib} MiB (scoring.memory_mib)",
            "crashed": f"killed its process ({answer['reason']})",
            "raised": f"failed: {answer['reason']}",
        }[failure]
        log.warning(
            "the code that scores %s; %s. It got the reward 0, as all will that fail like this: scoring/num_failed_%s counts them.%s",
            what,
            about_completion(problem, text),
            failure,
            f"\n{answer['traceback'].rstrip()}" if answer["traceback"] else "",
        )
