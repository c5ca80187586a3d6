"""A score that takes long is named while it is awaited."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from offline_grpo.errors import ScoreError
from offline_grpo.generation import judging
from offline_grpo.generation.judging import Judgement
from offline_grpo.types import Problem, Score

PROBLEM = Problem("train-3", ({"role": "user", "content": "1+1="},), "2")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher of its own, that waits for a fraction of a second."""
    monkeypatch.setattr(judging, "SLOW_S", 0.05)
    monkeypatch.setattr(judging, "_slow", judging._SlowScores())


class Task:
    """Scores, in the thread that asks or in the background, after a while."""

    def __init__(self, wait_s: float, *, is_async: bool) -> None:
        self.wait_s, self.is_async = wait_s, is_async

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        if self.is_async:
            return self._later()
        time.sleep(self.wait_s)
        return Score(1.0, True, {})

    async def _later(self) -> Score:
        await asyncio.sleep(self.wait_s)
        return Score(1.0, True, {})


def judge(task: Any, text: str) -> Score:
    return Judgement(task, PROBLEM, text).result()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_slow_score_is_named_once(is_async: bool, impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("the slow one", "another"):
        judge(Task(0.3, is_async=is_async), text)
    assert [record.getMessage() for record in caplog.records] == ["a score takes more than 0 s: problem train-3, completion 'the slow one'"]


def test_a_slow_score_is_named_though_others_are_quick_meanwhile(impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    slow = threading.Thread(target=judge, args=(Task(0.3, is_async=False), "the slow one"))
    slow.start()
    while slow.is_alive():
        judge(Task(0.0, is_async=False), "quick")
    assert [record.getMessage() for record in caplog.records] == ["a score takes more than 0 s: problem train-3, completion 'the slow one'"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -1e200, "1"])
def test_a_reward_with_which_nothing_can_be_computed_is_refused(reward: Any) -> None:
    task = SimpleNamespace(score=lambda *_: Score(reward, True, {}))
    with pytest.raises(ScoreError, match=r"the task's score has reward=.*; it must be a finite number, from -1e\+30 to 1e\+30; problem"):
        judge(task, "any")


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


def test_many_quick_scores_are_not_slow(impatient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Together they take longer than one may."""
    monkeypatch.setattr(judging, "SLOW_S", 1.0)  # a busy machine may stand still for a part of that
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        judge(Task(0.0, is_async=False), "quick")
    assert caplog.records == []
