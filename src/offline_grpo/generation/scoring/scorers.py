"""Processes of this machine that score completions and can be killed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import count
from typing import Any

from offline_grpo.errors import ScoreError
from offline_grpo.generation.scoring.messages import LINE_BYTES, Request, Setup, frame, read_line
from offline_grpo.types import Problem

CLOSE_S = 15.0


class Scorers:
    """Asks a process below which workers do the scoring (see `host.py`), all from one event loop."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._connection: asyncio.Task[asyncio.StreamWriter] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._broken: ScoreError | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from offline_grpo.generation.scoring.host import main; main()"
            )
            nowhere = subprocess.DEVNULL
            self._host = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=theirs.fileno(),
                stdout=nowhere,
                stderr=nowhere,
                start_new_session=True,
            )

    async def answer(self, problem: Problem, text: str) -> dict[str, Any]:
        """What a worker says of a completion: the fields of a `Score`, or what `messages.failed` makes.

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
            return await future
        finally:
            self._waiting.pop(number, None)

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
        memory = f"scoring.memory_mib={self._setup.memory_bytes // 2**20} may be too little for what they import"
        self._broken = ScoreError(
            f"the processes that score do not work: {reason}; {memory}; scoring.workers=0 needs none{trace}"
        )
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._broken)
