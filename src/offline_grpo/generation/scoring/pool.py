"""Processes of this machine that score completions and can be killed, and the task that asks them."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from offline_grpo.errors import ScoreError
from offline_grpo.generation.judging import about_completion, warn_once
from offline_grpo.generation.scoring.worker import MESSAGE_BYTES, Opening, Setup, failed, frame
from offline_grpo.interfaces import Task
from offline_grpo.settings import ScoringConfig
from offline_grpo.types import Problem, Reply, Score, Split

if TYPE_CHECKING:
    from offline_grpo.generation.episodes import Episode

GRACE_S = 1.0
"""An async score has so much beyond its deadline, which its worker keeps: that may be busy with another one."""
CLOSE_S = 15.0


class Asked(Protocol):
    """`Scorers` of this machine, or of a cluster (`cluster.py`)."""

    async def answer(self, problem: Problem, text: Any) -> dict[str, Any]: ...
    def close(self) -> None: ...


class IsolatedTask:
    """A `Task` like `task`, whose `score` is async and asks `scorers`.

    Code that takes longer than `timeout_s`, needs more than `memory_mib`, ends its process or raises costs one score,
    which says so (`Score.failure`). The first failure of each cause is logged.
    """

    def __init__(self, task: Task, scorers: Asked, settings: ScoringConfig, num_live: int = 0) -> None:
        self._task, self._scorers, self.num_live = task, scorers, num_live
        self._on_failure = settings.on_failure
        self.said: set[str] = set()  # what was logged once in this run, and is not again
        self._causes = {
            "memory": f"needed more than {settings.memory_mib} MiB (scoring.memory_mib)",
            "crashed": "killed its process",
            "raised": "failed",
            "none": "gave no reward (None)",
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._task.problems(split)

    async def score(self, problem: Problem, text: str) -> Score:
        """See `Task.score`. Raises ScoreError as `Scorers.answer` does."""
        return self._score(await self._scorers.answer(problem, text), about_completion(problem, text))

    @property
    def rewards_groups(self) -> bool:
        return getattr(self._task, "rewards_groups", False)

    async def score_group(self, problem: Problem, texts: tuple[str, ...]) -> list[Score]:
        """See `Task`. A failure is one of all completions. Raises ScoreError as `Scorers.answer` does."""
        answer = await self._scorers.answer(problem, texts)
        if "failure" in answer:
            return [self._score(answer, about_completion(problem, texts))] * len(texts)
        pairs = zip(answer["scores"], texts, strict=True)
        return [self._score(each, about_completion(problem, text)) for each, text in pairs]

    async def play(self, problem: Problem, episode: Episode) -> Score:
        """See `Task`. Raises as `score`."""
        return self._score(await self._scorers.answer(problem, episode), f"problem {problem.problem_id}")

    def _score(self, answer: dict[str, Any], about: str) -> Score:
        failure = answer.get("failure")
        if failure is None:
            return Score(answer["reward"], answer["is_correct"], answer["parts"], measured=answer["measured"])
        details = answer["details"].rstrip()
        what = self._causes.get(failure, details)
        get = f"scoring.on_failure={self._on_failure}; scoring/num_failed_{failure} counts them"
        text = f"the code that scores {what}; {about}. {get}.\n{details.removeprefix(what)}"
        warn_once(self.said, failure, text.rstrip())
        raised = details.partition("\n")[0] if failure == "raised" else ""
        return Score.unscored(failure if failure == "none" else f"{failure}: {raised or what:.300}")

    def close(self) -> None:
        """End all processes that score."""
        self._scorers.close()


@dataclass(eq=False)
class _Request:
    answer: asyncio.Future[dict[str, Any] | None]  # None: the worker ended, maybe because of another request
    deadline: asyncio.TimerHandle
    is_awaited: bool = False  # async: its worker takes others meanwhile
    episode: Episode | None = None  # if that is what it asks for
    end: asyncio.TimerHandle | None = None  # of the episode


class _Worker(asyncio.Protocol):
    """The connection to a worker, for all requests (`is_shared`) or for one. `hear` gets each message, then None."""

    transport: asyncio.Transport

    def __init__(self, number: int, hear: Callable[[_Worker, dict[str, Any] | None], None], *, is_shared: bool) -> None:
        self.number, self.is_shared = number, is_shared
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_alive = True
        self.pending: dict[int, _Request] = {}
        self._hear, self._received = hear, bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self.is_alive and b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._hear(self, json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._hear(self, None)


class Scorers:
    """Starts workers when they are needed (see `worker.py`), asks them, and ends those that fail with all that they
    started.

    Not `pebble` or `multiprocessing`: a worker awaits many async scores at a time, processes that a score has started
    are killed with it, and nothing outlives a run that is killed.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._numbers = count()
        self._num_to_start = setup.num_workers
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None, or one that has ended: start another
        self._room_alone = asyncio.Semaphore(setup.num_workers)
        self._control, theirs = socket.socketpair()
        with theirs:
            run = f"from offline_grpo.generation.scoring.worker import main; main({theirs.fileno()})"
            self._host = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {run}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._host.stdin is not None
        with self._host.stdin as stdin:
            pickle.dump(setup, stdin)

    async def answer(self, problem: Problem, text: str | tuple[str, ...] | Episode) -> dict[str, Any]:
        """The answer of a worker to a completion, a group of them, or an episode: the fields of a `Score`, or of
        `failed`. To cancel it ends an episode's worker.

        Raises:
            ScoreError: no worker can make the task, or the process above them has ended.
        """
        if self._free.empty() and self._num_to_start > 0:
            self._num_to_start -= 1
            self._free.put_nowait(None)
        worker = await self._free.get()
        if worker is None or not worker.is_alive:
            try:
                worker = await self._start(is_shared=True)
            except BaseException:
                self._free.put_nowait(None)
                raise
        try:
            answer = await self._ask(worker, problem, text)
        except asyncio.CancelledError:
            if not isinstance(text, (str, tuple)):
                self._end(worker, None)
            raise
        if answer is None:
            # A worker that is killed, or dies, takes all async scores with it that it awaits. Which one is to blame
            # shows when each is scored again, alone.
            async with self._room_alone:
                worker = await self._start(is_shared=False)
                try:
                    answer = await self._ask(worker, problem, text)
                finally:
                    self._end(worker, None)
        assert answer is not None  # it was alone
        return answer

    def close(self) -> None:
        """End all processes of it."""
        self._control.close()
        try:
            self._host.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._host.kill()  # its workers die with it
            self._host.wait()

    async def _start(self, *, is_shared: bool) -> _Worker:
        worker = _Worker(next(self._numbers), self._hear, is_shared=is_shared)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [worker.number.to_bytes(MESSAGE_BYTES, "big")], [theirs.fileno()])
            except OSError as error:
                raise self._broken("the process that starts them has ended") from error
        worker.transport, _ = await asyncio.get_running_loop().create_connection(lambda: worker, sock=ours)
        try:
            await worker.is_ready
        except BaseException:
            self._end(worker, None)
            raise
        return worker

    def _broken(self, reason: str) -> ScoreError:
        memory = f"scoring.memory_mib={self._setup.memory_bytes // 2**20} may be too little for what they import"
        return ScoreError(f"the processes that score do not work ({memory}; scoring.workers=0 needs none): {reason}")

    def _ask(
        self, worker: _Worker, problem: Problem, text: str | tuple[str, ...] | Episode
    ) -> asyncio.Future[dict[str, Any] | None]:
        """The worker's answer; None where another score ended it. A caller that gives up does not end the deadline."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        request = worker.pending[number] = _Request(loop.create_future(), self._deadline(worker, number))
        asked = text if isinstance(text, (str, tuple)) else Opening(text.seed, text.base_url, text.api_key)
        if not isinstance(text, (str, tuple)):
            assert problem.rules is not None
            request.episode = text
            limit = problem.rules.timeout_s, "task.episode_timeout_s"
            request.end = loop.call_later(problem.rules.timeout_s, self._time_out, worker, request, *limit)
        worker.transport.write(frame(problem, asked, number))
        return request.answer

    def _deadline(self, worker: _Worker, number: int, more_s: float = 0.0) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._setup.timeout_s + more_s, self._late, worker, number)

    def _late(self, worker: _Worker, number: int) -> None:
        """Its time is up, if it was not the policy that it waited for."""
        request = worker.pending[number]
        left_s = 0.0 if request.episode is None else self._setup.timeout_s - request.episode.working_s
        if left_s > 0:
            request.deadline = asyncio.get_running_loop().call_later(left_s, self._late, worker, number)
        else:
            self._time_out(worker, request, self._setup.timeout_s, "scoring.timeout_s")

    def _time_out(self, worker: _Worker, request: _Request, seconds: float, key: str) -> None:
        after = "" if request.episode is None else f" {request.episode.place}"
        self._end(worker, "timeout", f"took more than {seconds:g} s ({key}){after}")

    def _reply(self, worker: _Worker, reply: asyncio.Future[Reply]) -> None:
        if worker.is_alive and not reply.cancelled():
            worker.transport.write(frame(reply.exception() or reply.result()))

    def _hear(self, worker: _Worker, answer: dict[str, Any] | None) -> None:
        if answer is None:
            if not worker.is_ready.done():
                worker.is_ready.set_exception(self._broken("one has died"))
            self._end(worker, None if self._control.fileno() < 0 else "crashed")  # below 0: see `close`
        elif "ready" in answer:
            worker.is_ready.set_result(None)
        elif "broken" in answer:
            worker.is_ready.set_exception(self._broken(answer["broken"]))
        elif "awaits" in answer:
            request = worker.pending[answer["number"]]
            request.is_awaited = True
            request.deadline.cancel()
            request.deadline = self._deadline(worker, answer["number"], GRACE_S)
            if worker.is_shared:
                self._free.put_nowait(worker)
        elif "say" in answer:
            request = worker.pending[answer["number"]]
            assert request.episode is not None
            reply = asyncio.wrap_future(request.episode.ask(*answer["say"]))
            reply.add_done_callback(partial(self._reply, worker))
        elif "pay" in answer:
            episode = worker.pending[answer["number"]].episode
            assert episode is not None
            episode.pay(answer["pay"])
        else:
            self._finish(worker, worker.pending.pop(answer["number"]), answer)
            if answer.get("failure") == "memory":
                self._end(worker, None)

    def _finish(self, worker: _Worker, request: _Request, answer: dict[str, Any] | None) -> None:
        request.deadline.cancel()
        if request.end is not None:
            request.end.cancel()
        if not request.answer.cancelled():
            request.answer.set_result(answer)
        if worker.is_shared and not request.is_awaited:
            self._free.put_nowait(worker)

    def _end(self, worker: _Worker, failure: str | None, details: str = "") -> None:
        """Kill a worker with all that it started. With `failure`, its request has failed, if it has one alone."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        with suppress(OSError):  # nothing is left of it where the process that started it has ended
            self._control.send(worker.number.to_bytes(MESSAGE_BYTES, "big"))
        worker.transport.close()
        answer = failed(failure, details) if failure is not None and len(worker.pending) == 1 else None
        for request in worker.pending.values():
            self._finish(worker, request, answer)
        worker.pending.clear()
