"""Environments of the user's own: what their methods become, and what their rewards are."""

from __future__ import annotations

import asyncio
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dialogues import CODEC, EOS, Scripted, ids, problem_of
from worlds import agent, environment

from offline_grpo.errors import ScoreError
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.task.environment import Environment
from offline_grpo.types import FinishReason, Reply, Rollout, SamplingParams


class Paid:
    """Each turn is worth 1, and so is each earlier reply at the end."""

    def reset(self, **row: Any) -> None:
        self.heard = 0

    def respond(self, text: str) -> str:
        self.heard += 1
        return "2+2="

    def get_turn_reward(self) -> float:
        return 1.0

    def get_reward(self) -> float:
        return 100.0 * self.heard


def play(task: Environment, replies: list[str], *, max_new_tokens: int = 100) -> Rollout:
    """An episode in which the policy says these replies, and ends each."""
    client = Scripted([[*ids(reply), EOS] for reply in replies])
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    [group] = sample_in_order(client, task, CODEC, [(problem_of(task), 0)], sampling, group_size=1)
    [rollout] = group.rollouts
    return rollout


@pytest.mark.parametrize(
    ("limits", "max_new_tokens", "num_turns"),
    [
        ({"max_turns": 2}, 100, 2),
        ({"max_environment_tokens": 9}, 100, 3),  # "2+2=" has 4
        ({}, 6, 2),  # a reply has 3 tokens
    ],
)
def test_each_turn_is_paid_once_whatever_limit_ends_the_episode(
    limits: dict[str, int], max_new_tokens: int, num_turns: int
) -> None:
    task = environment(f"{__name__}:Paid", **limits)
    rollout = play(task, ["12"] * 9, max_new_tokens=max_new_tokens)
    assert [turn.reward for turn in rollout.turns] == [1.0] * num_turns
    assert rollout.score.parts == {"turns": num_turns, "episode": 100.0 * num_turns}
    assert rollout.score.reward == 101.0 * num_turns
    assert rollout.finish_reason is FinishReason.LENGTH


class Parts(Paid):
    """Rewards in parts, of whatever kind of number."""

    def respond(self, text: str) -> str | None:  # type: ignore[override]
        super().respond(text)
        return "2+2=" if self.heard < 3 else None

    def get_turn_reward(self) -> Any:
        return {"manners": 0.5, "brief": np.float32(0.25)} if self.heard < 3 else None

    async def get_reward(self) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return {"right": torch.tensor(True), "wrong": None, "brief": np.int64(2)}


def test_parts_of_a_reward_are_added_up_and_named() -> None:
    rollout = play(environment(f"{__name__}:Parts", correct_threshold=4.5), ["12"] * 3)
    assert rollout.score.parts == {"manners": 1.0, "brief": 2.5, "right": 1.0}
    assert (rollout.score.reward, rollout.score.is_correct) == (4.5, True)
    assert [turn.reward for turn in rollout.turns] == [0.75, 0.75, 0.0]


class Returns:
    value: Any = None

    def reset(self, **row: Any) -> None: ...

    def get_reward(self) -> Any:
        return self.value


def solve(row: Any, base_url: str, api_key: str) -> Any:
    return Returns.value


@pytest.mark.parametrize(
    ("value", "parts", "is_correct"),
    [
        (True, {"episode": 1.0}, True),
        (np.float64(0.5), {"episode": 0.5}, False),
        ({"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 0.7, "b": 0.2, "c": 0.1}, True),  # 1.0 but for rounding
        (None, {}, False),
        ({"a": None}, {}, False),
        (math.nan, None, False),
        ("1.0", None, False),
        ({}, None, False),
        ({"a": [1.0]}, None, False),
    ],
)
def test_environments_and_agents_have_one_rule_for_rewards(
    monkeypatch: pytest.MonkeyPatch, value: Any, parts: dict[str, float] | None, is_correct: bool
) -> None:
    """That of reward functions: None is no reward, and what is no number is a failure."""
    monkeypatch.setattr(Returns, "value", value)
    chat: Any = type("Chat", (), {"seed": 0, "base_url": "", "api_key": ""})()
    task = agent(f"{__name__}:solve")
    for played in (
        lambda: play(environment(f"{__name__}:Returns"), ["1"]).score,
        lambda: task.play(problem_of(task), chat),
    ):
        if parts is None:
            with pytest.raises(ScoreError, match="it must be a number, True or False, a dict of numbers, or None"):
                played()
        else:
            score = played()
            assert (dict(score.parts), score.is_correct, score.failure == "none") == (parts, is_correct, parts == {})


def documented(function: Any) -> Any:
    """Behind a wrapper, as decorators of users leave it."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    inner.__doc__ = "Add.\n\nArgs:\n    first: The first.\n    second: The second.\n"
    return inner


class Base:
    @staticmethod
    @documented
    def inherited(first: int, second: int = 2) -> int:
        return first + second


class Kinds(Base):
    """A tool of each kind, and what is none."""

    names: tuple[str, ...] = ()

    class Inner: ...

    @property
    def size(self) -> int:
        raise AssertionError

    def reset(self, **row: Any) -> None: ...

    def get_reward(self) -> float:
        return 0.0

    @classmethod
    @documented
    async def of_class(cls, first: int, second: int = 2) -> int:
        return first + second if cls is Kinds else 0

    @documented
    async def own(self, first: int, second: int = 2) -> int:
        return first + second if isinstance(self, Kinds) else 0

    def _private(self) -> None: ...


class Game(Paid):
    def is_done(self) -> bool:
        """Whether the game is over."""
        return False


def test_a_tool_may_be_called_is_done() -> None:
    task = environment(f"{__name__}:Game")
    assert "is_done" in [tool["function"]["name"] for tool in task.tools]
    replies = iter([Reply("1", "1", num_tokens=1)] * 3 + [Reply(is_cut=True)])
    chat: Any = SimpleNamespace(seed=0, say=lambda *_: next(replies), pay=lambda _: None)
    assert task.play(problem_of(task), chat).parts == {"turns": 3.0, "episode": 300.0}


def test_methods_of_every_kind_are_tools_with_all_their_arguments() -> None:
    task = environment(f"{__name__}:Kinds")
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
    assert list(functions) == ["inherited", "of_class", "own"]
    for name, parameters in functions.items():
        assert (list(parameters["properties"]), parameters["required"]) == (["first", "second"], ["first"]), name
        assert task.call(Kinds(), name, {"first": 3}) == 5
