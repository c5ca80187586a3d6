"""Scores completions, at once or in the background, and says which one could not be scored."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import TracebackType

import numpy as np

from offline_grpo.engine.background import made_once
from offline_grpo.errors import GrpoError, ScoreError, StopRequested, told
from offline_grpo.interfaces import Task
from offline_grpo.types import Problem, Score

MAX_CONCURRENT = 64
"""How many async scores are awaited at a time: what they ask, such as a server with another model, has limits too."""

SLOW_S = 10.0
"""A score that takes longer is named in a warning, once in a process, while it is still awaited."""

LARGEST = 1e30
"""Of a reward: the spread of larger ones is beyond what numbers can be, and nothing would be learnt without a word."""

_SHOWN_CHARS = 200

log = logging.getLogger(__name__)


class Judgement:
    """The score of one completion. A task's `score` is called at once; if it is async, it is awaited in the background.

    Args:
        text: the completion without special tokens.

    Raises:
        ScoreError: the task raised, or returned something else than a score. `result` raises it where the score is
        async.
    """

    def __init__(self, task: Task, problem: Problem, text: str) -> None:
        self._problem, self._text = problem, text
        with _Asking(problem, text):
            score = task.score(problem, text)
            self._future = (
                asyncio.run_coroutine_threadsafe(_awaited(score), _loop()) if inspect.isawaitable(score) else None
            )
            self._score = checked(score) if self._future is None else None

    @property
    def is_done(self) -> bool:
        return self._future is None or self._future.done()

    def result(self) -> Score:
        """The score, as soon as it is there."""
        if self._score is None:
            assert self._future is not None
            with _Asking(self._problem, self._text):
                self._score = checked(self._future.result())
        return self._score

    def cancel(self) -> None:
        """Give up waiting."""
        if self._future is not None:
            self._future.cancel()


def scores_of(judgements: Sequence[Judgement]) -> list[Score]:
    """The scores of a group, as soon as all are there.

    A score that failed is 0, or that of the worst completion whose score is below 0: a policy would learn to make code
    fail that punishes.
    """
    scores = [judgement.result() for judgement in judgements]
    least = min((score.reward for score in scores if score.failure is None), default=0.0)
    return [score if score.failure is None else replace(score, reward=min(0.0, least)) for score in scores]


def about_completion(problem: Problem, text: str) -> str:
    """`problem train-3, completion '...'`"""
    shown = repr(text) if len(text) <= _SHOWN_CHARS else repr(text[:_SHOWN_CHARS]) + "..."
    return f"problem {problem.problem_id}, completion {shown}"


def checked(score: object) -> Score:
    """What a task's `score` returned, if it is a score. Raises ScoreError otherwise."""
    if not isinstance(score, Score):
        raise ScoreError(f"the task's score returned {score!r:.80}; it must be an offline_grpo.types.Score")
    if not isinstance(score.is_correct, (bool, np.bool_)):
        raise ScoreError(f"the task's score has is_correct={score.is_correct!r:.80}; it must be True or False")
    for name, value in (("reward", score.reward), *score.parts.items(), *score.measured.items()):
        if not (isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST):  # no NaN is
            raise ScoreError(
                f"the task's score has {name}={value!r:.80}; it must be a finite number, from -{LARGEST:g} to {LARGEST:g}"
            )
    return (
        score if isinstance(score.is_correct, bool) else replace(score, is_correct=bool(score.is_correct))
    )  # JSON knows no numpy


async def _awaited(score: Awaitable[Score]) -> Score:
    async with _room():
        return await score


@made_once
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process, because clients that async code makes once belong to the loop that
    they were used in. Threads that begin to score at the same time get the same one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="scores", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(
            SystemExit, KeyboardInterrupt
        ):  # of a task that a score has made: asyncio leaves its loop, and all that it awaits
            loop.run_forever()


@cache
def _room() -> asyncio.Semaphore:
    return asyncio.Semaphore(MAX_CONCURRENT)


@dataclass
class _SlowScores:
    """Warns about a score that takes longer than `SLOW_S`. A thread looks on, because the code that is slow may never
    return.
    """

    _current: dict[int, tuple[float, Problem, str]] = field(default_factory=dict, init=False)  # by thread
    _thread: threading.Thread | None = field(default=None, init=False)
    _starting: threading.Lock = field(
        default_factory=threading.Lock, init=False
    )  # threads that begin to score at once share one

    def begin(self, problem: Problem, text: str) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = self._thread = threading.Thread(target=self._look_on, name="slow scores", daemon=True)
                    thread.start()
        self._current[threading.get_ident()] = (time.monotonic(), problem, text)

    def end(self) -> None:
        self._current.pop(threading.get_ident(), None)

    def _look_on(self) -> None:
        while True:
            time.sleep(SLOW_S / 4)
            for began_s, problem, text in list(self._current.values()):
                if time.monotonic() - began_s > SLOW_S:
                    log.warning("a score takes more than %.0f s: %s", SLOW_S, about_completion(problem, text))
                    return


_slow = _SlowScores()


class _Asking:
    """While code of the user's own scores: it is watched, and if it raises, one line names problem and completion,
    instead of a traceback from inside that code. A class, because generators of `contextlib` would take as long as a
    simple score does."""

    def __init__(self, problem: Problem, text: str) -> None:
        self._problem, self._text = problem, text

    def __enter__(self) -> None:
        _slow.begin(self._problem, self._text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _slow.end()
        if error is None:
            return
        about = about_completion(self._problem, self._text)
        if isinstance(error, ScoreError):
            raise ScoreError(f"{error}; {about}") from error
        if isinstance(error, (Exception, SystemExit)) and not isinstance(
            error, (GrpoError, StopRequested)
        ):  # whatever that code raises
            raise ScoreError(
                f"a completion cannot be scored, {told(error)}; {about}; HYDRA_FULL_ERROR=1 shows the traceback"
            ) from error
