"""A process that calls the task's `score`: forked by `host.py`, limited, and ended by it with all that it started."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from offline_grpo.errors import ScoreError, place_of, reason_of, told
from offline_grpo.generation.judging import checked
from offline_grpo.generation.scoring.messages import LINE_BYTES, Request, Setup, failed, line, read_frame
from offline_grpo.interfaces import Task
from offline_grpo.types import Score

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_CHILDREN = 16
"""A worker whose scores have left more processes behind is replaced."""

_TRACEBACK_CHARS = 8000
_PACKAGE = str(Path(__file__).parents[2])

T = TypeVar("T")


def run(connection: socket.socket, output: int, setup: Setup) -> None:
    """The life of a worker, in a process that was just forked.

    Args:
        output: the file descriptor for what it prints.
    """
    connection = _alone_with(connection, output)
    _limit(setup.memory_bytes)
    try:
        task = pickle.loads(setup.make_task)()
    except BaseException as error:  # whatever a user's module does
        connection.sendall(line({"broken": told(error), "traceback": _traceback(error)}))
        signal.pause()  # until it is killed
        raise
    _Worker(task, setup.timeout_s).serve(connection)


def _alone_with(connection: socket.socket, output: int) -> socket.socket:
    """Keep the connection, standard input (empty) and output, and nothing else that the parent has open."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    asyncio.set_event_loop_policy(None)  # or asyncio.get_event_loop() would be the parent's
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        ctypes.CDLL(None).prctl(
            PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # what its shells leave behind stays its own: see `host._Host._sweep`
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    os.dup2(connection.detach(), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return socket.socket(fileno=3)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # what a process may write to and shares with nobody: RLIMIT_AS would count what torch and CUDA only reserve
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Worker:
    def __init__(self, task: Task, timeout_s: float) -> None:
        self._task, self._timeout_s = task, timeout_s
        self._awaited: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()

    def serve(self, connection: socket.socket) -> None:
        """Score what is asked, until the other side goes."""
        reader, self._writer = self._result(asyncio.open_connection(sock=connection))
        self._writer.write(line({"ready": True}))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._answer(self._result(read_frame(reader)))

    def _result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns; async scores go on meanwhile. The loop runs at no other time: a score that is not async may
        run one itself.
        """
        waiting = self._loop.create_task(coroutine)
        while not waiting.done():
            # of a task that a score has made: asyncio leaves its loop, and all that it awaits
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(waiting)
        return waiting.result()

    def _answer(self, request: Request) -> None:
        pid = os.getpid()
        try:
            score = self._task.score(request.problem, request.text)
            if inspect.isawaitable(score):
                self._say(request, {"awaits": True}, pid)
                waiting = self._loop.create_task(self._await(request, score, pid))
                self._awaited.add(waiting)
                waiting.add_done_callback(self._awaited.discard)
                return
            answer = _answer(score)
        except BaseException as error:  # whatever a user's function raises, SystemExit too
            answer = _failure(error)
        self._say(request, answer, pid)

    async def _await(self, request: Request, score: Awaitable[Score], pid: int) -> None:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                answer = _answer(await score)
        except BaseException as error:  # see `_answer`
            answer = failed("timeout", "") if deadline.expired() else _failure(error)
        self._say(request, answer, pid)

    def _say(self, request: Request, answer: dict[str, Any], pid: int) -> None:
        if os.getpid() != pid:
            os._exit(0)  # the function forked, and this is the copy
        used_up = answer.get("failure") == "memory" or _has_many_children()
        about = {"number": request.number, "used_up": used_up}
        said = line(answer | about)
        is_long = len(said) > LINE_BYTES
        self._writer.write(
            line(failed("raised", f"the score has {len(said):,} bytes of parts") | about) if is_long else said
        )


def _has_many_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none at all, as nearly always, and asking was cheap
        return False
    import psutil

    return len(psutil.Process().children(recursive=True)) > MAX_CHILDREN


def _answer(score: object) -> dict[str, Any]:
    """A score as JSON types. Raises ScoreError where it is none."""
    found = checked(score)
    numbers = {"reward": found.reward, "parts": dict(found.parts), "measured": dict(found.measured)}
    return numbers | {"is_correct": bool(found.is_correct)}


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return failed("memory", place_of(error), _traceback(error))
    if isinstance(error, ScoreError):  # our own, which names key and value
        return failed("raised", reason_of(error))
    return failed("raised", told(error), _traceback(error))


def _traceback(error: BaseException) -> str:
    """From the first line on that is not the package's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace)))[-_TRACEBACK_CHARS:]
