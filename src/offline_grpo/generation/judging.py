"""Scores completions, at once or in the background, and says which one could not be scored."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from offline_grpo.errors import ScoreError, told
from offline_grpo.interfaces import TaskFacts
from offline_grpo.types import Problem, Score

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_CONCURRENT = 64
"""How many async scores are awaited at a time: what they ask, such as a server with another model, has limits too."""

LARGEST = 1e30
"""Of a reward: the spread of larger ones is beyond what numbers can be, and nothing would be learnt without a word."""

_ROOM = asyncio.Semaphore(MAX_CONCURRENT)  # of the one loop below
_SHOWN_CHARS = 200


class Judgement:
    """The scores of a group's completions: each one's by `Task.score`, and where the task rewards groups, those of all
    together by `Task.score_group`. The task is called at once; what is async is awaited in the background.

    Raises:
        ScoreError: the task raised. `scores` raises it where the score is async, or no score.
    """

    def __init__(self, task: Any, problem: Problem, texts: Sequence[str]) -> None:
        self._problem = problem
        self._asked: list[str | tuple[str, ...]] = [*texts]
        self._asked += [tuple(texts)] if TaskFacts.of(task).rewards_groups else []
        self.futures: list[Future[Any]] = []
        # All are asked now: what is async runs while the task is called for the others.
        for text in self._asked:
            try:
                score = task.score(problem, text) if isinstance(text, str) else task.score_group(problem, text)
            except (Exception, SystemExit) as error:  # whatever code of the user's own raises
                self.cancel()
                raise self._named(error, text) from error
            if inspect.isawaitable(score):
                self.futures.append(asyncio.run_coroutine_threadsafe(_awaited(score), background_loop()))
            else:
                self.futures.append(Future())
                self.futures[-1].set_result(score)

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()

    def check(self, future: Future[Any]) -> list[Score]:
        """What one of `futures` has: the score of a completion, or those of the group."""
        try:
            found = future.result()
            return [checked(each) for each in (found if isinstance(found, list) else [found])]
        except (Exception, SystemExit) as error:
            raise self._named(error, self._asked[self.futures.index(future)]) from error

    def scores(self) -> list[Score]:
        """One of each completion, as soon as all are there."""
        pairs = list(zip(self._asked, map(self.check, self.futures), strict=True))
        scores = [own for text, [own, *_] in pairs if isinstance(text, str)]
        for text, of_group in pairs:
            if not isinstance(text, str):
                scores = [_together(*both) for both in zip(scores, of_group, strict=True)]
        return scores

    def _named(self, error: BaseException, text: str | tuple[str, ...]) -> ScoreError:
        about = about_completion(self._problem, text)
        if isinstance(error, ScoreError):
            return ScoreError(f"{error}; {about}")
        fix = "HYDRA_FULL_ERROR=1 shows the traceback"
        return ScoreError(f"a completion cannot be scored, {told(error)}; {about}; {fix}")


def _together(own: Score, of_group: Score) -> Score:
    """Rewards that do not apply ("none") are left out; a failure of either is one of both."""
    if own.failure == "none":
        return of_group
    if of_group.failure is not None and own.failure is None:
        return own if of_group.failure == "none" else of_group
    return replace(own, reward=own.reward + of_group.reward, parts={**own.parts, **of_group.parts})


def about_completion(problem: Problem, text: str | tuple[str, ...]) -> str:
    """`problem train-3, completion '...'`, or `completions ('...', '...')`"""
    what, shown = "completion" if isinstance(text, str) else "completions", repr(text)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    return f"problem {problem.problem_id}, {what} {shown}"


def warn_once(said: set[str], kind: str, text: str) -> None:
    """Log a warning, the first of its kind in a run. `said`: the kinds that were logged."""
    if kind not in said:
        said.add(kind)
        log.warning("%s", text)


def checked(score: object) -> Score:
    """What a task's `score` returned, if it is a score. Raises ScoreError otherwise."""
    if not isinstance(score, Score):
        raise ScoreError(f"the task's score returned {score!r:.80}; it must be an offline_grpo.types.Score")
    if not isinstance(score.is_correct, (bool, np.bool_)):
        raise ScoreError(f"the task's score has is_correct={score.is_correct!r:.80}; it must be True or False")
    if score.failure is not None:
        return Score.unscored(score.failure)
    for name, value in (("reward", score.reward), *score.parts.items(), *score.measured.items()):
        if not (isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST):  # no NaN is
            raise ScoreError(f"the task's score has {name}={value!r:.80}; it must be finite, at most {LARGEST:g}")
    is_plain = isinstance(score.is_correct, bool)
    return score if is_plain else replace(score, is_correct=bool(score.is_correct))  # JSON knows no numpy


async def _awaited(score: Awaitable[T]) -> T:
    try:
        async with _ROOM:
            return await score
    finally:
        if inspect.iscoroutine(score):  # cancelled before it was awaited, perhaps
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # so are the coroutines that it has
                score.close()


def made_once(make: Callable[[], T]) -> Callable[[], T]:
    """`functools.cache` for threads: alone it may call `make` twice if two threads come first at once."""
    making, cached = threading.Lock(), cache(make)

    def made() -> T:
        with making:
            return cached()

    return made


@made_once
def background_loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process, because clients that async code makes once belong to the loop that
    they were used in. Threads that begin to score at the same time get the same one."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            # of a task that a score has made: asyncio leaves its loop, and all that it awaits
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="scores", daemon=True).start()
    return loop
