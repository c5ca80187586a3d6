"""The process below which foreign code scores completions: forks workers, keeps their deadlines, and ends them with all
they started.

    python -c 'from offline_grpo.generation.scoring.host import main; main()'

Started by `scorers.py`; standard input is a socket that it listens to. It runs no foreign code itself. When the socket
closes, because the run let go or died by whatever signal, it kills everything below it and ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from offline_grpo.generation.scoring import worker as worker_process
from offline_grpo.generation.scoring.messages import (
    LINE_BYTES,
    Request,
    Setup,
    failed,
    frame,
    line,
    read_frame,
    read_line,
)

START_S = 300.0
"""For a worker to build the task: it may import a lot."""
GRACE_S = 1.0
"""What an async score has beyond its deadline, which its worker keeps: that worker may be busy with another one."""
SWEEP_S = 0.05
LAST_SWEEPS_S = 10.0
PRINTED_BYTES = 10 * 2**20
"""Of what foreign code prints, so many bytes are kept."""


def main() -> None:
    """See the text of this file."""
    if sys.platform == "linux":  # processes that workers leave behind when they end become our children
        ctypes.CDLL(None).prctl(worker_process.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asyncio.run(_serve(socket.socket(fileno=0)))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    answers: set[asyncio.Task[None]] = set()
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        setup: Setup = await read_frame(reader)
        for name in setup.preload:
            importlib.import_module(name)
        host = _Host(setup, writer, await _output(setup.printed))
        while True:
            answer = asyncio.create_task(host.answer(await read_frame(reader)))
            answers.add(answer)
            answer.add_done_callback(answers.discard)
    deadline = time.monotonic() + LAST_SWEEPS_S
    while _kill_below(psutil.Process()) and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(SWEEP_S)
    os._exit(0)


class _Printed(asyncio.Protocol):
    """Keeps the beginning of what workers print."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._left = path, PRINTED_BYTES

    def data_received(self, data: bytes) -> None:
        if self._path is not None and self._left > 0:
            with suppress(OSError), self._path.open("ab") as file:
                file.write(data[: self._left])
        self._left -= len(data)


async def _output(path: Path | None) -> int:
    """The end of a pipe that workers write to."""
    read_end, write_end = os.pipe()
    await asyncio.get_running_loop().connect_read_pipe(lambda: _Printed(path), os.fdopen(read_end, "rb"))
    return write_end


def _kill_below(process: psutil.Process) -> bool:
    """Kill all that a process started. Returns whether there was anything."""
    try:
        below = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    return bool(below)


@dataclass(eq=False)
class _Worker:
    """A worker, seen from here. `pending` has what it was asked and has not answered."""

    pid: int
    is_shared: bool  # among all requests; otherwise it was made for one
    writer: asyncio.StreamWriter | None = None  # there is one once it is ready
    pending: dict[int, asyncio.Future[dict[str, Any] | None]] = field(default_factory=dict)
    awaits: set[int] = field(default_factory=set)  # of those, async ones, beside which it takes others
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_alive: bool = True


class _Host:
    """Workers, and which of them is free."""

    def __init__(self, setup: Setup, trainer: asyncio.StreamWriter, output: int) -> None:
        self._setup, self._trainer, self._output = setup, trainer, output
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, _Worker] = {}
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._num_waiting = 0
        self._room_alone = asyncio.Semaphore(setup.num_workers)
        self._attending: set[asyncio.Task[None]] = set()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    async def answer(self, request: Request) -> None:
        """Have a completion scored, and say what came of it.

        A worker that has to be killed, or dies, takes the async scores with it that it awaits beside the one that is to
        blame. Which one that is shows when each is scored again, alone.
        """
        answer = await self._ask(await self._free_worker(), request)
        if answer is None:
            async with self._room_alone:
                worker = self._fork(is_shared=False)
                await worker.is_ready.wait()
                answer = await self._ask(worker, request)
                self._end(worker, "crashed", "")
        assert answer is not None  # it was alone
        self._trainer.write(line(answer | {"number": request.number}))

    async def _free_worker(self) -> _Worker:
        self._num_waiting += 1
        try:
            while True:
                if (
                    self._free.empty()
                    and sum(worker.is_shared for worker in self._workers.values()) < self._setup.num_workers
                ):
                    self._fork(is_shared=True)
                if (worker := await self._free.get()).is_alive:
                    return worker
        finally:
            self._num_waiting -= 1

    async def _ask(self, worker: _Worker, request: Request) -> dict[str, Any] | None:
        """A worker's answer; None where it did not answer because of another score."""
        if not worker.is_alive:  # one that was made for this request alone, and has ended since it was ready
            return failed("crashed", "ended before it was asked")
        assert worker.writer is not None
        future = worker.pending[request.number] = self._loop.create_future()
        worker.writer.write(frame(request))
        await asyncio.wait({future}, timeout=self._setup.timeout_s)
        if not future.done() and request.number in worker.awaits:
            await asyncio.wait({future}, timeout=GRACE_S)
        if not future.done():
            self._end(worker, "timeout", "")
        return future.result()

    def _fork(self, *, is_shared: bool) -> _Worker:
        try:
            ours, theirs = socket.socketpair()
            pid = os.fork()
        except OSError as error:  # else whoever waits for an answer would wait for ever
            self._trainer.write(line({"broken": f"no process can be started ({error.strerror})", "traceback": ""}))
            raise
        if pid == 0:
            try:
                worker_process.run(theirs, self._output, self._setup)
            finally:
                os._exit(0)
        theirs.close()
        worker = self._workers[pid] = _Worker(pid, is_shared)
        attending = asyncio.create_task(self._attend(worker, ours))
        self._attending.add(attending)
        attending.add_done_callback(self._attending.discard)
        return worker

    async def _attend(self, worker: _Worker, connection: socket.socket) -> None:
        """Listen to a worker until it goes."""
        late = self._loop.call_later(START_S, self._end, worker, "crashed", f"was not ready after {START_S:.0f} s")
        reader, worker.writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
        while (answer := await read_line(reader)) is not None:
            if "broken" in answer:
                self._trainer.write(line(answer))
            elif "ready" in answer:
                late.cancel()
                worker.is_ready.set()
                self._is_free(worker)
            else:
                self._hear(worker, answer)
        await asyncio.sleep(SWEEP_S)  # `_reap` knows better why, if it has ended
        self._end(worker, "crashed", "closed its connection")
        worker.writer.close()

    def _hear(self, worker: _Worker, answer: dict[str, Any]) -> None:
        number = answer.get("number", -1)
        if number not in worker.pending:
            return
        if "awaits" in answer:
            worker.awaits.add(number)
            self._is_free(worker)
            return
        worker.pending.pop(number).set_result(answer)
        if answer["used_up"]:
            self._end(worker, "crashed", "", is_one_to_blame=False)
        elif number not in worker.awaits:
            self._is_free(worker)
        worker.awaits.discard(number)

    def _is_free(self, worker: _Worker) -> None:
        if worker.is_shared:
            self._free.put_nowait(worker)

    def _end(self, worker: _Worker, failure: str, reason: str, *, is_one_to_blame: bool = True) -> None:
        """Kill a worker with all that it started. What it was asked has failed, if it was one thing."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(worker.pid)
            process.suspend()
            _kill_below(process)
            process.kill()
        self._workers.pop(worker.pid, None)
        self._loop.call_later(SWEEP_S, self._sweep)
        if not worker.is_ready.is_set():
            self._trainer.write(line({"broken": reason, "traceback": ""}))
        for future in worker.pending.values():
            future.set_result(failed(failure, reason) if is_one_to_blame and len(worker.pending) == 1 else None)
        worker.pending.clear()
        if self._num_waiting > 0 and worker.is_shared:
            self._fork(is_shared=True)

    def _reap(self) -> None:
        """Children have ended: workers, and what they had left behind."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                code = os.waitstatus_to_exitcode(status)
                if (worker := self._workers.get(pid)) is not None:
                    self._end(
                        worker,
                        "crashed",
                        f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}",
                    )

    def _sweep(self) -> None:
        """Kill what workers have left behind that are no more. (What those leave behind that live is theirs: see
        `worker._alone_with`.)
        """
        left = [child for child in psutil.Process().children() if child.pid not in self._workers]
        for child in left:
            _kill_below(child)
            with suppress(psutil.NoSuchProcess):
                child.kill()
        if left:
            self._loop.call_later(SWEEP_S, self._sweep)
