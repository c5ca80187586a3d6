"""What a group repeats is scored once, where a task says that its scores are deterministic."""

import asyncio
from types import SimpleNamespace

import pytest

from offline_grpo.generation.judging import Judgement
from offline_grpo.generation.scoring import IsolatedTask
from offline_grpo.types import Problem


@pytest.mark.parametrize(("is_deterministic", "expected"), [(True, ["a", "b"]), (False, ["a", "b", "a"])])
def test_a_completion_is_scored_once(is_deterministic, expected):
    asked = []

    async def answer(problem, text):
        asked.append(text)
        await asyncio.sleep(0.01)
        if text == "late" and asked.count(text) == 1:
            return {"failure": "timeout", "details": "took too long"}
        return {"reward": float(text == "a"), "is_correct": text == "a", "parts": {}, "measured": {}}

    task = SimpleNamespace(is_deterministic=is_deterministic, problems=lambda split: [], score=None)
    scorers = SimpleNamespace(answer=answer, own_address="")
    isolated = IsolatedTask(task, scorers, SimpleNamespace(memory_mib=1, on_failure="exclude"))
    judgement = Judgement(isolated, Problem("train-0", (), ""), ["a", "b", "a"])
    assert [score.reward for score in judgement.scores()] == [1, 0, 1]
    assert asked == expected
    # Another problem's is another one, and its own comes again from memory.
    assert [s.reward for s in Judgement(isolated, Problem("train-1", (), ""), ["b", "a"]).scores()] == [0, 1]
    assert [s.reward for s in Judgement(isolated, Problem("train-0", (), ""), ["b"]).scores()] == [0]
    assert len(asked) == (4 if is_deterministic else 6)
    # A failure, such as that of a machine that was busy, is none of the next time.
    for failure in ("timeout: took too long", None):
        [score] = Judgement(isolated, Problem("train-0", (), ""), ["late"]).scores()
        assert score.failure == failure
