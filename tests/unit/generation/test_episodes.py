"""Episodes: who asks what when, what becomes a rollout, and what a program may do."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
from dialogues import CODEC, EOS, SAMPLING, InProcess, Server, answer, ids, isolated, problem_of, sampled
from worlds import environment

from offline_grpo.errors import EngineDied, ScoreError
from offline_grpo.generation.dialogue import Dialogue
from offline_grpo.generation.episodes import Episode
from offline_grpo.generation.sample import sample_groups
from offline_grpo.task.mixture import Mixture
from offline_grpo.types import (
    Completion,
    CompletionStream,
    FinishReason,
    Message,
    Problem,
    Rules,
    SamplingParams,
    SamplingRequest,
    Score,
    Split,
)

RULES = Rules(max_turns=8, max_turn_tokens=None, max_environment_tokens=100, timeout_s=60)


def test_an_episode_is_a_rollout_of_several_turns() -> None:
    task = environment()
    [rollouts] = sampled(InProcess(), task, [problem_of(task, turns=3)])
    for rollout in rollouts:
        said = [[*rollout.token_ids[turn.start : turn.end]] for turn in rollout.turns]
        assert [each[-1] for each in said] == [EOS] * 3
        one, two, three = said
        assert [*rollout.token_ids] == [*ids("<bos>1+1="), *one, *ids("2+2="), *two, *ids("1+1="), *three]
        assert sum(rollout.is_sampled) == sum(map(len, said))
        assert [turn.reward for turn in rollout.turns] == [float(len(each) > 2) for each in said]
        assert [message["role"] for message in rollout.conversation] == ["user", "assistant"] * 3
        assert rollout.text.splitlines()[1::2] == ["[user] 2+2=", "[user] 1+1="]
        assert rollout.finish_reason is FinishReason.STOP
        measured = {"turns": 3, "environment_tokens": 8, **dict.fromkeys(("calls", "malformed_calls"), 0)}
        measured |= {"sequences": 1, "tool_errors": 0}
        assert rollout.score.measured == measured
        assert rollout.score.reward == pytest.approx(
            sum(turn.reward for turn in rollout.turns) + rollout.score.parts["episode"]
        )
    assert len({rollout.score.parts["episode"] for rollout in rollouts}) == 1, "chance is the group's"
    assert len({rollout.token_ids for rollout in rollouts}) == 3


def test_the_same_tokens_whoever_samples_and_in_whatever_order() -> None:
    task = environment()
    problems = [problem_of(task, turns=turns) for turns in (3, 1, 2, 5)]
    here = InProcess()
    found = [sampled(client, task, problems) for client in (here, Server(), Server())]
    assert found[0] == found[1] == found[2]
    assert here.sizes[0] == 12, "what programs ask meanwhile is sampled together"


class Answered:
    """A task of one completion."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem("p", ({"role": "user", "content": "2+2="},), "4")]

    def score(self, problem: Problem, text: str) -> Score:
        return Score(float(text == problem.answer), text == problem.answer, {})


def test_a_mixture_answers_and_plays() -> None:
    class Both(InProcess):
        def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
            found = iter(requests)
            first = next(found)
            if first is None or first.num_completions == 1:
                yield from super().generate(chain([first], found), sampling)
            else:
                yield 0, [answer(replace(first, seed=first.seed + j)) for j in range(first.num_completions)]
                assert not [*found]

    env = environment()
    mixture = Mixture(tasks={"a": Answered(), "b": env}, weights=None)
    played = replace(problem_of(env, turns=2), problem_id="b::train-0")
    single = replace(Answered().problems(Split.TRAIN)[0], problem_id="a::p")
    found = sampled(Both(), mixture, [played, single, played])
    assert [[len(rollout.turns) for rollout in own] for own in found] == [[2, 2, 2], [0, 0, 0], [2, 2, 2]]


@pytest.mark.parametrize(
    ("limits", "num_turns"),
    [({"max_turns": 2}, 2), ({"max_turn_tokens": 1}, 1), ({"max_environment_tokens": 7}, 2), ({}, None)],
)
def test_limits_end_an_episode(limits: dict[str, int], num_turns: int | None) -> None:
    settings: dict[str, Any] = {"max_turns": 30, "max_environment_tokens": 1000, **limits}
    task = environment(**settings)
    [rollouts] = sampled(InProcess(), task, [problem_of(task, turns=29)])
    for rollout in rollouts:
        assert (rollout.finish_reason, rollout.score.failure) == (FinishReason.LENGTH, None)
        assert len(rollout.turns) == num_turns or (num_turns is None and rollout.num_sampled == 40)
        assert max(turn.end - turn.start for turn in rollout.turns) <= limits.get("max_turn_tokens", 40)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_equal_prompts_are_drawn_with_other_seeds_and_a_rewritten_history_begins_anew() -> None:
    dialogue = Dialogue(CODEC.chat, SAMPLING, RULES, CODEC.encode([user("1+1=")]), 7)

    def say(messages: Sequence[Message]) -> tuple[SamplingRequest, Message]:
        ask = dialogue.ask(messages, ())
        assert ask is not None
        return ask.request, dialogue.answer(ask, answer(ask.request)).message

    (first, one), (again, two) = say([user("1+1=")]), say([user("1+1=")])
    assert first.prompt_ids == again.prompt_ids
    assert first.seed != again.seed
    more, _ = say([user("1+1="), two, user("2+2=")])
    assert more.prompt_ids == (*again.prompt_ids, *answer(again).token_ids, *ids("2+2="))
    other, _ = say([user("9+9="), one, user("2+2=")])
    assert other.prompt_ids == (*ids("<bos>9+9="), *ids(str(one["content"])), EOS, *ids("2+2="))
    fork, _ = say([user("1+1="), two, user("3+3=")])
    dialogue.pay(2.0)
    rollout = dialogue.rollout(Score(0.0, False, {}))
    # The sequences are the replies that nothing was said after, each behind all that it was sampled after.
    asked = (first, again, more, other, fork)
    said = [answer(each).token_ids for each in asked]
    sequences = [(*asked[i].prompt_ids, *said[i]) for i in (0, 2, 3, 4)]
    assert rollout.token_ids == tuple(chain(*sequences))
    assert [*rollout.starts, len(rollout.token_ids)] == [0, *accumulate(map(len, sequences))]
    # Each turn once, in the order in which they were answered: the second, sampled before the fork, before the third.
    assert [rollout.token_ids[turn.start : turn.end] for turn in rollout.turns] == said
    assert [turn.reward for turn in rollout.turns] == [0.0, 0.0, 0.0, 0.0, 2.0]
    sampled_at = [i for turn in rollout.turns for i in range(turn.start, turn.end)]
    assert sorted(sampled_at) == [i for i, is_sampled in enumerate(rollout.is_sampled) if is_sampled]
    assert rollout.turns[1].end < rollout.starts[2] < rollout.turns[3].start
    measured = rollout.score.measured
    of_other = (Counter(other.prompt_ids) - Counter(ids("<bos>1+1="))).total()  # without what the problem's prompt has
    assert measured["environment_tokens"] == len(ids("2+2=")) + of_other + len(ids("3+3="))
    assert (measured["turns"], measured["sequences"]) == (5.0, 4.0)


def test_an_engine_that_dies_between_two_turns_costs_nothing() -> None:
    """Its error reaches the loop, which samples again."""

    class Mortal(Server):
        num_left = 10

        async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
            self.num_left -= 1
            if self.num_left < 0:
                raise EngineDied("gone")
            return await super().ask(request, sampling)

    task, client = environment(), Mortal()
    problems = [problem_of(task, turns=turns) for turns in (3, 1, 4)]
    with pytest.raises(EngineDied):
        sampled(client, task, problems)
    client.num_left = 1000
    assert sampled(client, task, problems) == sampled(Server(), task, problems)
    client.close()


def test_a_program_that_asks_after_its_end_does_not_wait_for_ever() -> None:
    dialogue = Dialogue(CODEC.chat, SAMPLING, RULES, [1, 5], 7)
    episode = Episode(problem_of(environment()), 7, dialogue, SimpleQueue())
    episode.score = Future()
    episode.cancel()
    assert episode.ask([user("1+1=")], ()).cancelled()
    rollout = dialogue.rollout(Score(0.0, False, {}, "timeout"))
    assert (rollout.token_ids, rollout.num_sampled, rollout.turns) == ((1, 5), 0, ()), "its prompt alone"


def test_a_program_that_fails_in_the_runs_process_ends_the_run() -> None:
    task = environment("worlds:Bad")
    with pytest.raises(ScoreError, match=r"problem train-0 cannot be played, RuntimeError: no \(worlds.py, line \d+"):
        sampled(InProcess(), task, [problem_of(task, turns=2, how="raise")])


FINE = dict.fromkeys(("", "fork", "child", "print", "bytes", "long", "await"))
FINE["none"] = None  # no reward of the episode: those of its turns are all
RAISE = dict.fromkeys(("raise", "exit", "recursion", "nan", "text"), "raised")
MISBEHAVE = {**FINE, **RAISE, "hang": "timeout", "sleep": "timeout", "kill": "crashed", "memory": "memory"}


@pytest.mark.slow
def test_misbehaviour_costs_one_episode(tmp_path: Path) -> None:
    make = partial(environment, "worlds:Bad")
    before = {p.pid for p in psutil.process_iter()}
    task = isolated(make, tmp_path / "printed.log")
    try:
        problems = [problem_of(make(), turns=2, how=how) for how in MISBEHAVE]
        found = sampled(InProcess(), task, problems, group_size=2)
        causes = [{str(rollout.score.failure).partition(":")[0] for rollout in own} for own in found]
        assert dict(zip(MISBEHAVE, causes, strict=True)) == {how: {str(cause)} for how, cause in MISBEHAVE.items()}
        for how, own in zip(MISBEHAVE, found, strict=True):
            assert {len(rollout.turns) for rollout in own} == {3 if how == "bytes" else 2}
    finally:
        task.close()
    time.sleep(0.5)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in left if p.info["cmdline"] in (["sleep", "60"],)]


@pytest.mark.slow
def test_an_episode_has_a_time_limit_of_its_own_and_ends_when_sampling_does() -> None:
    class Slow(Server):
        async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
            await asyncio.sleep(0.4)
            return [answer(request)]

    make = partial(environment, "worlds:Talk", episode_timeout_s=1.0)
    task = isolated(make)
    try:
        [[short], [long]] = sampled(Slow(), task, [problem_of(make(), turns=n) for n in (1, 8)], group_size=1)
        assert short.score.failure is None
        said = r"timeout: took more than 1 s \(task.episode_timeout_s\) after the policy's reply '\d+'"
        assert re.fullmatch(said, str(long.score.failure))
        assert 1 <= len(long.turns) <= 3
        draws = [(problem_of(make(), turns=n), 0) for n in (1, 8)]
        groups = sample_groups(Slow(), task, CODEC, draws, SAMPLING, group_size=1)
        next(groups)
        began = time.monotonic()
        groups.close()  # type: ignore[attr-defined]
        assert time.monotonic() - began < 1
    finally:
        task.close()
