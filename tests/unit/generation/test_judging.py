"""A score that takes long is named while it is awaited."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offline_grpo.errors import ScoreError
from offline_grpo.generation import judging
from offline_grpo.generation.judging import Judgement
from offline_grpo.types import Problem, Score

PROBLEM = Problem("train-3", ({"role": "user", "content": "1+1="},), "2")


class Told(logging.Handler):
    """What was told, and whether anything was."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.anything = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.anything.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """By a watcher of its own, that waits for a fraction of a second."""
    monkeypatch.setattr(judging, "SLOW_S", 0.05)
    monkeypatch.setattr(judging, "_slow", judging._SlowScores())
    handler = Told()
    judging.log.addHandler(handler)
    yield handler
    judging.log.removeHandler(handler)


THE_SLOW_ONE = ["a score takes more than 0 s: problem train-3, completion 'the slow one'"]


class Task:
    """Scores, in the thread that asks or in the background, when `is_over` or after ten seconds."""

    def __init__(self, is_over: Callable[[], bool] = lambda: True, *, is_async: bool = False) -> None:
        self.is_over, self.is_async = is_over, is_async
        self.began = threading.Event()

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        self.began.set()
        deadline = time.monotonic() + 10
        if self.is_async:
            return self._later(deadline)
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.002)
        return Score(1.0, True, {})

    async def _later(self, deadline: float) -> Score:
        while not self.is_over() and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return Score(1.0, True, {})


def judge(task: Any, text: str) -> Score:
    return Judgement(task, PROBLEM, text).result()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_slow_score_is_named_once(is_async: bool, told: Told) -> None:
    judge(Task(told.anything.is_set, is_async=is_async), "the slow one")
    ends = time.monotonic() + 0.3
    judge(Task(lambda: time.monotonic() > ends, is_async=is_async), "another")
    assert told.lines == THE_SLOW_ONE


def test_a_slow_score_is_named_though_others_are_quick_meanwhile(told: Told) -> None:
    task = Task(told.anything.is_set)
    slow = threading.Thread(target=judge, args=(task, "the slow one"))
    slow.start()
    assert task.began.wait(10)  # so that it is the slowest, however busy the machine
    while slow.is_alive():
        judge(Task(), "quick")
    assert told.lines == THE_SLOW_ONE


def test_threads_that_begin_to_score_at_once_share_a_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would warn twice."""
    made: list[None] = []

    class Slow(threading.Thread):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            made.append(None)
            time.sleep(0.05)

    monkeypatch.setattr(judging, "_slow", judging._SlowScores())
    threads = [threading.Thread(target=judge, args=(Task(), "any")) for _ in range(4)]
    monkeypatch.setattr(judging, "threading", SimpleNamespace(Thread=Slow, get_ident=threading.get_ident))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf, -1e200, "1"])
def test_a_reward_with_which_nothing_can_be_computed_is_refused(reward: Any) -> None:
    task = SimpleNamespace(score=lambda *_: Score(reward, True, {}))
    with pytest.raises(
        ScoreError, match=r"the task's score has reward=.*; it must be a finite number, from -1e\+30 to 1e\+30; problem"
    ):
        judge(task, "any")


def test_what_is_neither_right_nor_wrong_is_refused() -> None:
    """`bool("no")` is true."""
    with pytest.raises(ScoreError, match=r"the task's score has is_correct='no'; it must be True or False"):
        judge(SimpleNamespace(score=lambda *_: Score(0.5, "no", {})), "any")  # type: ignore[arg-type]
    assert judge(SimpleNamespace(score=lambda *_: Score(0.5, np.bool_(True), {})), "any").is_correct is True


class Exits:
    """Awaits a task that exits, as code that a model has written may."""

    async def score(self, problem: Problem, text: str) -> Score:
        if text == "exits":
            await asyncio.gather(self._exit())
        await asyncio.sleep(0.05)
        return Score(1.0, True, {})

    async def _exit(self) -> None:
        sys.exit(3)


def test_an_async_score_that_exits_costs_the_others_nothing() -> None:
    judgements = [Judgement(Exits(), PROBLEM, text) for text in ("fine", "exits", "fine")]
    assert [judgements[i].result().reward for i in (0, 2)] == [1.0, 1.0]
    with pytest.raises(ScoreError, match=r"^a completion cannot be scored, SystemExit: 3 .*completion 'exits'"):
        judgements[1].result()
    assert judge(Exits(), "fine").reward == 1.0


class Clock:
    """In place of the module `time`, for a watcher that sleeps until it is woken. Scores take as long as is said here."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._asleep, self._wakes = threading.Semaphore(0), threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        self._asleep.release()
        self._wakes.acquire()

    def look(self) -> None:
        """Have the watcher look once, to the end."""
        assert self._asleep.acquire(timeout=10)
        self._wakes.release()
        assert self._asleep.acquire(timeout=10), "it has ended"
        self._asleep.release()


def test_many_quick_scores_are_not_slow(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take longer than one may."""
    clock = Clock()

    class Takes(Task):
        def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
            clock.now_s += 0.9 * judging.SLOW_S
            clock.look()
            return super().score(problem, text)

    monkeypatch.setattr(judging, "time", clock)
    for _ in range(5):
        judge(Takes(), "quick")
    assert told.lines == []
