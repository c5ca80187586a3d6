"""Scores completions, at once or in the background, and says which one could not be scored."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np

from offline_grpo.engine.background import made_once
from offline_grpo.errors import ScoreError, told
from offline_grpo.interfaces import Task
from offline_grpo.types import Problem, Score

MAX_CONCURRENT = 64
"""How many async scores are awaited at a time: what they ask, such as a server with another model, has limits too."""

SLOW_S = 10.0
"""A score that takes longer is named in a warning, once in a process: an async one while it is still awaited."""

LARGEST = 1e30
"""Of a reward: the spread of larger ones is beyond what numbers can be, and nothing would be learnt without a word."""

_SHOWN_CHARS = 200
_has_warned = False

log = logging.getLogger(__name__)


class Judgement:
    """The score of one completion. A task's `score` is called at once; if it is async, it is awaited in the background.

    Args:
        text: the completion without special tokens.

    Raises:
        ScoreError: the task raised, or returned no score. `result` raises it where the score is async.
    """

    def __init__(self, task: Task, problem: Problem, text: str) -> None:
        self._problem, self._text = problem, text
        self._future: Future[Score] | None = None
        began_s = time.monotonic()
        try:
            score = task.score(problem, text)
            if inspect.isawaitable(score):
                self._future = asyncio.run_coroutine_threadsafe(_awaited(score, problem, text), _loop())
            else:
                self._score = checked(score)
        except (Exception, SystemExit) as error:  # whatever code of the user's own raises
            raise _named(error, problem, text) from error
        if time.monotonic() - began_s > SLOW_S:
            _warn_of_slow_score(problem, text)

    @property
    def is_done(self) -> bool:
        return self._future is None or self._future.done()

    def result(self) -> Score:
        """The score, as soon as it is there."""
        if self._future is None:
            return self._score
        try:
            return checked(self._future.result())
        except (Exception, SystemExit) as error:
            raise _named(error, self._problem, self._text) from error

    def cancel(self) -> None:
        """Give up waiting."""
        if self._future is not None:
            self._future.cancel()


def as_scored(judgements: Iterable[Judgement]) -> Iterator[Judgement]:
    """The judgements, each as soon as it is done. Raises ScoreError as `result` does."""
    by_future: dict[Future[Score], Judgement] = {}
    for judgement in judgements:
        if judgement._future is None:
            yield judgement
        else:
            by_future[judgement._future] = judgement
    for future in as_completed(by_future):
        by_future[future].result()
        yield by_future[future]


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
            raise ScoreError(f"the task's score has {name}={value!r:.80}; it must be finite, at most {LARGEST:g}")
    is_plain = isinstance(score.is_correct, bool)
    return score if is_plain else replace(score, is_correct=bool(score.is_correct))  # JSON knows no numpy


async def _awaited(score: Awaitable[Score], problem: Problem, text: str) -> Score:
    warning = asyncio.get_running_loop().call_later(SLOW_S, _warn_of_slow_score, problem, text)
    try:
        async with _room():
            return await score
    finally:
        warning.cancel()
        if inspect.iscoroutine(score):  # cancelled before it was awaited, perhaps
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # so are the coroutines that it has
                score.close()


@made_once
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process, because clients that async code makes once belong to the loop that
    they were used in. Threads that begin to score at the same time get the same one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="scores", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # of a task that a score has made: asyncio leaves its loop, and all that it awaits
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


@cache
def _room() -> asyncio.Semaphore:
    return asyncio.Semaphore(MAX_CONCURRENT)


def _warn_of_slow_score(problem: Problem, text: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        about = about_completion(problem, text)
        log.warning("a score takes more than %.0f s (it, or those that its worker scores before it): %s", SLOW_S, about)


def _named(error: BaseException, problem: Problem, text: str) -> ScoreError:
    """The error with the problem and the completion that it is about, in one line."""
    about = about_completion(problem, text)
    if isinstance(error, ScoreError):
        return ScoreError(f"{error}; {about}")
    return ScoreError(f"a completion cannot be scored, {told(error)}; {about}; HYDRA_FULL_ERROR=1 shows the traceback")
