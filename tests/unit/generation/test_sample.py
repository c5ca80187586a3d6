"""From problems to scored groups: what a task gets to see, and when; what is no score is refused, and async scores end
alone.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from factories import make_completion

from offline_grpo.errors import ScoreError
from offline_grpo.generation.judging import Judgement
from offline_grpo.generation.sample import sample_groups, sample_in_order
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import CompletionStream, Problem, SamplingParams, SamplingRequest, Score, ServedWeights, Split

TOKENIZER = build_char_tokenizer(64)
CODEC = TokenizerCodec(TOKENIZER)
EOS = TOKENIZER.eos_token_id
PROBLEMS = [Problem(f"p{i}", ({"role": "user", "content": f"{i}="},), answer=str(i)) for i in range(3)]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7, stop=("#",))


class Listening:
    """A task that notes what it is asked to judge."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def problems(self, split: Split) -> Sequence[Problem]:
        return PROBLEMS

    def score(self, problem: Problem, text: str) -> Score:
        self.seen.append((problem.problem_id, text))
        return Score(1.0, True, {})


class Reversed:
    """A client that answers `DIGIT#9` and EOS, the last request first."""

    is_local = True
    weights = ServedWeights(4)

    is_closed = False

    def generate(self, requests: Iterable[SamplingRequest], sampling: SamplingParams) -> CompletionStream:
        try:
            for index, request in reversed(list(enumerate(requests))):
                text = TOKENIZER.encode(f"{request.seed}#9", add_special_tokens=False)
                yield index, [make_completion([*text, EOS], version=4)] * request.num_completions
        finally:
            self.is_closed = True

    def close(self) -> None: ...


DRAWS = [(problem, seed) for seed, problem in enumerate(PROBLEMS)]


def test_the_task_sees_text_without_eos_and_what_follows_a_stop_string() -> None:
    """A reward for an exact answer would otherwise depend on how the model spells its end."""
    task = Listening()
    groups = sample_in_order(Reversed(), task, CODEC, DRAWS, SAMPLING, group_size=2)
    assert task.seen == [("p2", "2")] * 2 + [("p1", "1")] * 2 + [("p0", "0")] * 2
    rollout = groups[1].rollouts[0]
    assert rollout.token_ids[-1] == EOS, "the tokens keep it: its probability is trained"
    assert (rollout.num_sampled, rollout.temperature, rollout.versions[-1], rollout.text) == (4, 0.7, 4, "1")


def test_a_group_is_scored_before_the_others_are_there() -> None:
    task, client = Listening(), Reversed()
    groups = sample_groups(client, task, CODEC, DRAWS, SAMPLING, group_size=1)
    assert next(groups)[0] == 2
    assert task.seen == [("p2", "2")]
    groups.close()  # type: ignore[attr-defined]  # a generator
    assert client.is_closed, "what is still open is abandoned"


@pytest.mark.parametrize(
    ("on_failure", "others", "expected"),
    [("least", (-1.0, -3.0), -3.0), ("least", (1.0, 2.0), 0.0), ("zero", (-1.0, -3.0), 0.0), ("exclude", (1.0,), None)],
)
def test_a_score_that_fails_has_no_reward_but_the_one_that_is_set(
    on_failure: str, others: Sequence[float], expected: float | None
) -> None:
    class Failing(Listening):
        def score(self, problem: Problem, text: str) -> Score:
            self.seen.append((problem.problem_id, text))
            number = len(self.seen) - 1
            return Score(others[number], False, {}) if number < len(others) else Score.unscored("timeout")

    [group] = sample_in_order(Reversed(), Failing(), CODEC, DRAWS[:1], SAMPLING, group_size=len(others) + 1)
    assert not group.rollouts[-1].score.is_scored
    scores = [rollout.score for rollout in group.with_failures(on_failure).rollouts]
    assert [score.reward if score.is_scored else None for score in scores] == [*others, expected]
    assert scores[-1].failure == "timeout"


PROBLEM = Problem("train-3", ({"role": "user", "content": "1+1="},), "2")


def judge(task: Any, text: str) -> Score:
    return Judgement(task, PROBLEM, [text]).scores()[0]


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (Score(math.nan, True, {}), "reward=nan"),
        (Score(-1e200, True, {}), "reward=-1e"),
        (Score("1", True, {}), "reward='1'"),  # type: ignore[arg-type]
        (Score(0.5, "no", {}), "is_correct='no'"),  # type: ignore[arg-type]  # `bool("no")` is true
    ],
)
def test_what_is_no_score_is_refused(score: Score, said: str) -> None:
    with pytest.raises(ScoreError, match=f"^the task's score has {said}.*; problem train-3"):
        judge(SimpleNamespace(score=lambda *_: score), "any")
    assert judge(SimpleNamespace(score=lambda *_: Score(0.5, np.bool_(True), {})), "any").is_correct is True


class Exits:
    """Awaits a task that exits, as code that a model has written may."""

    async def score(self, problem: Problem, text: str) -> Score:
        async def leave() -> None:
            sys.exit(3)

        if text == "exits":
            await asyncio.gather(leave())
        await asyncio.sleep(0.05)
        return Score(1.0, True, {})


def test_an_async_score_that_exits_costs_the_others_nothing() -> None:
    judgements = [Judgement(Exits(), PROBLEM, [text]) for text in ("fine", "exits", "fine")]
    assert [judgements[i].scores()[0].reward for i in (0, 2)] == [1.0, 1.0]
    with pytest.raises(ScoreError, match=r"^a completion cannot be scored, SystemExit: 3 .*completion 'exits'"):
        judgements[1].scores()
    assert judge(Exits(), "fine").reward == 1.0
