"""The processes that run foreign code: one below the run forks workers, and each worker scores completions, or plays
episodes.

    python -c 'from offline_grpo.generation.scoring_worker import main; main(FD)'

That one is started by `scoring.py`; it runs no foreign code itself. When its socket closes, because the run closed it
or died by whatever signal, it kills all processes below it and ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from offline_grpo.engine.spawn import adopt_orphans, end_with_parent
from offline_grpo.errors import GrpoError, reason_of, told
from offline_grpo.generation.judging import checked
from offline_grpo.types import Message, Problem, Reply, Schema

MESSAGE_BYTES = 8
"""Of a number that stands for a worker: with its end of a connection it asks for one, alone it ends that worker."""
KILL_S = 10.0
LOOK_S, LARGEST_LOG = 1.0, 64 * 2**20
"""How often the file with what foreign code prints is looked at, and beyond how many bytes it loses the later half."""

_TRACEBACK_CHARS = 8000

T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """The settings of the processes that score."""

    make_task: bytes  # pickled; makes the task in a worker. Only workers import what it needs
    preload: tuple[str, ...]  # modules that are imported once for all workers; none of a user's own
    num_workers: int
    timeout_s: float
    memory_bytes: int
    printed: Path | None  # the file that gets what foreign code prints; None: nothing is kept


@dataclass(frozen=True)
class Opening:
    """Asks for an episode, where a completion's text asks for its score. See `Chat`."""

    seed: int
    base_url: str
    api_key: str


def frame(*content: object) -> bytes:
    """A request: what to judge (a text, texts, an `Opening`), and a number for its answer; or a reply of the policy."""
    body = pickle.dumps(content)
    return len(body).to_bytes(8, "big") + body


def failed(failure: str, details: str = "") -> dict[str, Any]:
    """The answer in place of a score."""
    return {"failure": failure, "details": details}


def main(control_fd: int) -> None:
    """Fork and end workers until the other side of the socket closes. Standard input has the pickled `Setup`."""
    setup: Setup = pickle.load(sys.stdin.buffer)
    control = socket.socket(fileno=control_fd)
    adopt_orphans()  # processes that workers leave behind when they end become our children
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for name in setup.preload:
        importlib.import_module(name)
    # A number with a connection asks for a worker, a number alone ends that one.
    pids: dict[int, int] = {}
    while True:
        if not select.select([control], [], [], LOOK_S)[0]:
            if setup.printed is not None and setup.printed.is_file() and setup.printed.stat().st_size > LARGEST_LOG:
                os.truncate(setup.printed, LARGEST_LOG // 2)  # whoever prints appends, wherever it ends
            continue
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        if not message:
            _kill_all_but(set())
            os._exit(0)
        number = int.from_bytes(message, "big")
        for fd in fds:
            pids[number] = os.fork()
            if pids[number] == 0:
                try:
                    _work(fd, setup)
                finally:
                    os._exit(0)
            os.close(fd)
        if not fds:
            del pids[number]
            _kill_all_but(set(pids.values()))


def _kill_all_but(pids: set[int]) -> None:
    """Kill every process below this one, but these children and what is below them.

    A worker adopts what its own children leave behind, so that all it started is below it, in whatever process group.
    """
    deadline = time.monotonic() + KILL_S
    while left := [child for child in psutil.Process().children() if child.pid not in pids]:
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.suspend()  # it starts nothing any more
                for below in child.children(recursive=True):
                    below.kill()
                child.kill()
        if time.monotonic() > deadline:  # the kernel cannot end them
            return
        time.sleep(0.01)


def _work(fd: int, setup: Setup) -> None:
    """The life of a worker, in a process that was just forked."""
    # Processes that its children leave behind become its own, and it ends with the one that forked it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    end_with_parent()
    adopt_orphans()
    # It keeps the connection, as 3, standard input (empty) and output, and nothing else that the parent has open.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    printed = setup.printed  # on another machine there may be no such folder
    place = printed if printed is not None and printed.parent.is_dir() else os.devnull
    output = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    os.dup2(fd, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    # Its memory is what it may write to and shares with nobody: RLIMIT_AS would count what torch and CUDA only reserve.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = setup.memory_bytes if hard == resource.RLIM_INFINITY else min(setup.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # It says whether it can make the task, and then answers requests.
    connection, task = socket.socket(fileno=3), None
    try:
        task, first = pickle.loads(setup.make_task)(), {"ready": True}
    except BaseException as error:  # whatever a user's module does
        first = {"broken": _failure(error)["details"]}
    connection.sendall(json.dumps(first).encode() + b"\n")
    if task is not None:
        _Worker(task, setup.timeout_s).serve(connection)


@dataclass(eq=False)
class _Worker:
    task: Any
    timeout_s: float
    pid: int = field(default_factory=os.getpid)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    awaited: set[asyncio.Task[None]] = field(default_factory=set)
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    def serve(self, connection: socket.socket) -> None:
        """Score requests until the other side closes the connection."""
        self.reader, self.writer = self._result(asyncio.open_connection(sock=connection))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._answer(*self.receive())

    def receive(self) -> tuple[Any, ...]:
        """The next message of the run."""
        size = int.from_bytes(self._result(self.reader.readexactly(8)), "big")
        return pickle.loads(self._result(self.reader.readexactly(size)))

    def send(self, number: int, answer: Mapping[str, object]) -> None:
        """JSON, because nothing that comes from a process with foreign code is unpickled."""
        if os.getpid() != self.pid:
            os._exit(0)  # the function forked, and this is the copy
        self.writer.write(json.dumps({**answer, "number": number}).encode() + b"\n")

    def _result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result; async scores run meanwhile, and at no other time: a score that is not async may run a loop."""
        waiting = self.loop.create_task(coroutine)
        while not waiting.done():
            # of a task that a score has made: asyncio leaves its loop, and all that it awaits
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_until_complete(waiting)
        return waiting.result()

    def _answer(self, problem: Problem, asked: str | tuple[str, ...] | Opening, number: int) -> None:
        score: Any = None
        try:
            if isinstance(asked, Opening):
                score = self.task.play(problem, _Chat(self, number, asked.seed, asked.base_url, asked.api_key))
            elif isinstance(asked, str):
                score = self.task.score(problem, asked)
            else:
                score = self.task.score_group(problem, asked)
            answer = {"awaits": True} if inspect.isawaitable(score) else _as_json(score)
        except BaseException as error:  # whatever a user's function raises, SystemExit too
            answer = _failure(error)
        self.send(number, answer)
        # An async score is awaited while others begin: the run, which has just been told, sends them.
        if "awaits" in answer:
            waiting = self.loop.create_task(self._await(number, score))
            self.awaited.add(waiting)
            waiting.add_done_callback(self.awaited.discard)

    async def _await(self, number: int, score: Awaitable[object]) -> None:
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                answer = _as_json(await score)
        except BaseException as error:  # see `_answer`
            late = failed("timeout", f"took more than {self.timeout_s:g} s (scoring.timeout_s)")
            answer = late if deadline.expired() else _failure(error)
        self.send(number, answer)


@dataclass(eq=False)
class _Chat:
    """A `Chat`, for a program in a worker."""

    worker: _Worker
    number: int
    seed: int
    base_url: str
    api_key: str

    def say(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> Reply:
        self.worker.send(self.number, {"say": [list(messages), list(tools)]})
        [reply] = self.worker.receive()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pay(self, reward: float) -> None:
        self.worker.send(self.number, {"pay": float(reward)})


def _as_json(score: object) -> dict[str, Any]:
    """A score, or those of a group, as JSON types. Raises ScoreError where it is none."""
    if isinstance(score, list):
        return {"scores": list(map(_as_json, score))}
    found = checked(score)
    if found.failure is not None:
        return failed(found.failure)
    numbers = {"reward": found.reward, "parts": dict(found.parts), "measured": dict(found.measured)}
    return numbers | {"is_correct": found.is_correct}


def _failure(error: BaseException) -> dict[str, Any]:
    """The answer where code has raised, with its traceback; our own errors, which name key and value, need none."""
    text = f"{told(error)}\n{''.join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]}"
    text = reason_of(error) if isinstance(error, GrpoError) else text
    details = text.encode(errors="backslashreplace").decode()  # halves of characters
    return failed("memory" if isinstance(error, MemoryError) else "raised", details)
