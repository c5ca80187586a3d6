"""What is no score is refused; async scores end alone."""

from __future__ import annotations

import asyncio
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offline_grpo.errors import ScoreError
from offline_grpo.generation.judging import Judgement
from offline_grpo.types import Problem, Score

PROBLEM = Problem("train-3", ({"role": "user", "content": "1+1="},), "2")


def judge(task: Any, text: str) -> Score:
    return Judgement(task, PROBLEM, [text]).scores()[0]


@pytest.mark.parametrize("reward", [math.nan, -1e200, "1"])
def test_a_reward_with_which_nothing_can_be_computed_is_refused(reward: Any) -> None:
    task = SimpleNamespace(score=lambda *_: Score(reward, True, {}))
    with pytest.raises(ScoreError, match=r"the task's score has reward=.*; it must be finite.*; problem train-3"):
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
    judgements = [Judgement(Exits(), PROBLEM, [text]) for text in ("fine", "exits", "fine")]
    assert [judgements[i].scores()[0].reward for i in (0, 2)] == [1.0, 1.0]
    with pytest.raises(ScoreError, match=r"^a completion cannot be scored, SystemExit: 3 .*completion 'exits'"):
        judgements[1].scores()
    assert judge(Exits(), "fine").reward == 1.0
