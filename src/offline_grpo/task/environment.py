"""Environments and agents of the user's own: a class whose methods are tools, played in turns, and any function that
talks to the policy as a client of OpenAI's API does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FunctionType, MethodType
from typing import Annotated, Any, ClassVar

from offline_grpo.errors import ConfigError, ScoreError, reason_of
from offline_grpo.interfaces import Chat
from offline_grpo.settings import above, at_least
from offline_grpo.task.pictures import picture_of, shown, url_part
from offline_grpo.task.problems import BaseTask
from offline_grpo.task.rewards import imported, reward_parts, total
from offline_grpo.task.rows import Row, RowTask, messages_or_text, with_pictures_of
from offline_grpo.types import Message, Problem, Rules, Schema, Score

OWN = ("reset", "respond", "get_reward", "get_turn_reward")
"""Methods that are no tools."""


@dataclass(frozen=True, kw_only=True)
class Episodes(BaseTask):
    """Problems that are played in turns, and how far an episode may go."""

    max_turns: Annotated[int, at_least(1)]
    max_turn_tokens: Annotated[int | None, at_least(1)]
    max_environment_tokens: Annotated[int, at_least(1)]
    episode_timeout_s: Annotated[float, above(0, " and finite")]
    correct_threshold: float

    has_address: ClassVar[bool] = False

    @property
    def tools(self) -> tuple[Schema, ...]:
        """Their schemas, as far as they are known before an episode."""
        return ()

    @cached_property
    def rules(self) -> Rules:
        limits = self.max_turns, self.max_turn_tokens, self.max_environment_tokens, self.episode_timeout_s
        return Rules(*limits, self.tools, self.has_address)

    def score(self, problem: Problem, text: str) -> Score:
        """Only whole episodes have a score."""
        raise ScoreError(f"problem {problem.problem_id} is played in turns; a text alone has no score")


@dataclass(frozen=True, kw_only=True)
class EpisodeTask(Episodes, RowTask):
    """Rows that are played in turns."""

    prompt_field: str
    image_field: str | None

    worker_imports: ClassVar[tuple[str, ...]] = ("numpy",)  # so that `seed_globally` finds it

    def problem_of(self, problem_id: str, row: Row) -> Problem:
        """Every field of the row is one of the problem."""
        if not isinstance(row.value, Mapping):
            raise ConfigError(f"{row.where} is not a JSON object")
        prompt: Any = ""
        if self.prompt_field in row.value:
            prompt = messages_or_text(row, self.prompt_field, "task.prompt_field")
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt, pictures = with_pictures_of(row, prompt, self.image_field, self.folder)
        messages, answer = self.messages(row, prompt), str(row.value.get("answer", ""))
        return Problem(problem_id, messages, answer, dict(row.value), self.rules, pictures=pictures)

    def asked_by(self, row: Row, problem: Problem) -> Sequence[Message]:
        """Environments make of the whole row what they ask."""
        return [{"role": "user", "content": json.dumps(problem.fields, sort_keys=True, default=str)}]


@dataclass(frozen=True, kw_only=True)
class ToolEpisodes(Episodes):
    """Episodes that objects play, of which `played` asks what `Environment` says."""

    max_result_chars: Annotated[int, at_least(2)]

    def call(self, world: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        """What a tool returns. It may raise whatever it likes."""
        raise NotImplementedError

    def played(self, world: Any, problem: Problem, chat: Chat) -> Score:
        """One episode, which `world` plays."""
        # What `reset` returns goes behind the user's message; messages are copied, because this one changes.
        rules = problem.rules
        tools = () if rules is None else rules.tools
        messages = shown(problem)
        begun = self._said(awaited(world.reset(**problem.fields)) or "")
        messages[-1]["content"] = joined(messages[-1]["content"], begun)
        earned: list[Mapping[str, float]] = []
        errors = 0
        while True:
            # 1. The policy replies.
            reply = chat.say(messages, tools)
            if reply.is_cut and not reply.num_tokens:  # a limit was reached before: there was no such turn
                break
            messages.append(dict(reply.message))
            # 2. Its calls are answered by the tools, and a reply without any by the environment itself.
            results = []
            for call in reply.calls:
                try:
                    content = self._said(self.call(world, call.name, call.arguments))
                except Exception as error:  # whatever the tool raises at arguments that the policy made up
                    if isinstance(error, (MemoryError, ScoreError)):
                        raise
                    content, errors = self._text({"error": str(error)}), errors + 1
                results.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content})
            if not reply.is_cut and not results and hasattr(world, "respond"):
                answer = awaited(world.respond(reply.content))
                results += [] if answer is None else [{"role": "user", "content": self._said(answer)}]
            # 3. The turn may have earned something by itself.
            if hasattr(world, "get_turn_reward"):
                said = awaited(world.get_turn_reward())
                earned.append(reward_parts(said, "turns", "get_turn_reward() of the environment"))
                chat.pay(sum(earned[-1].values()))
            # 4. The episode ends at a limit, where nobody answers, or where the environment says so.
            is_done = getattr(world, "is_done", False)
            if reply.is_cut or not results or (is_done and not callable(is_done)):  # a method is a tool
                break
            messages += results
        # Its own reward, and those of the turns, by their names.
        said = awaited(world.get_reward()) if hasattr(world, "get_reward") else 0.0
        earned.append(reward_parts(said, "episode", "get_reward() of the environment"))
        parts = {name: math.fsum(own.get(name, 0.0) for own in earned) for each in earned for name in each}
        return total(parts, self.correct_threshold, {"tool_errors": float(errors)})

    def _said(self, result: object) -> str | list[dict[str, Any]]:
        """What a tool returns, as the content of a message: text, or parts where it is a picture of PIL, or a list with
        one.
        """
        pieces = result if isinstance(result, (list, tuple)) else [result]
        kind = getattr(sys.modules.get("PIL.Image"), "Image", ())  # without PIL it can be none
        if not any(isinstance(piece, kind) for piece in pieces):
            return self._text(result)
        return [
            url_part(picture_of(piece, Path()).data)
            if isinstance(piece, kind)
            else {"type": "text", "text": self._text(piece)}
            for piece in pieces
        ]

    def _text(self, result: object) -> str:
        text = str(result)
        left_out, half = len(text) - self.max_result_chars, self.max_result_chars // 2
        return text if left_out <= 0 else f"{text[:half]} ... {left_out} characters left out ... {text[-half:]}"


@dataclass(frozen=True, kw_only=True)
class Environment(ToolEpisodes, EpisodeTask):
    """Episodes of a class by the contract of TRL's `environment_factory`:

        reset(**row)          begins an episode; a text that it returns goes behind the user's message
        get_reward()          the reward (`reward_parts`), once the policy calls no tool any more, or at a limit
        other public methods  tools, with types and Google docstrings; sync or async. One that raises returns the error

    and, which TRL has not:

        respond(text)         what the user says to a reply that calls no tool; None ends the episode
        get_turn_reward()     a part of the reward, for the last turn alone; asked once for each turn

    `Score.measured`: `tool_errors`. The setting `environment` may also name a function that makes such an object.
    """

    environment: str
    examples: list[dict[str, Any]]

    _idle: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """Objects that have played, and can play again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "needs a method reset(self, **row), and get_reward(self) or get_turn_reward(self)"
        has_all = "reset" in self._methods and not {"get_reward", "get_turn_reward"}.isdisjoint(self._methods)
        self.check("environment", has_all, fix)

    @cached_property
    def _factory(self) -> Any:
        return imported(self.environment, "task.environment", "class")

    @cached_property
    def _methods(self) -> dict[str, Any]:
        """By name, those that are public, bound as those of an object: also @staticmethod and @classmethod."""
        # A function that makes objects is called once, to see what it makes.
        kind = self._factory if inspect.isclass(self._factory) else type(self._factory())
        found = inspect.getmembers(kind, lambda f: isinstance(inspect.unwrap(f), (FunctionType, MethodType)))
        public = [name for name, _ in found if not name.startswith("_")]
        return {name: inspect.getattr_static(kind, name).__get__(self, kind) for name in public}

    def messages(self, row: Row, prompt: Sequence[Message]) -> tuple[Message, ...]:
        """The prompt, after the system message and the examples."""
        whole = Row("task:", 0, {"examples": [*self.examples, {"role": "user", "content": ""}]})
        examples: Any = messages_or_text(whole, "examples", "task.examples")[:-1]
        return super().messages(row, [*examples, *prompt])

    @property
    def tools(self) -> tuple[Schema, ...]:
        from transformers.utils.chat_template_utils import (  # which imports torch
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )

        found = []
        for name, function in self._methods.items():
            if name in OWN:
                continue
            try:
                found.append(get_json_schema(function))
            except (DocstringParsingException, TypeHintParsingException, NameError) as error:  # or a type is not there
                about = f"task.environment={self.environment}: the tool {name} has no schema, {reason_of(error)}"
                fix = "give it types, and a docstring with a line for each argument below Args:"
                raise ConfigError(f"{about}; {fix}. A method that is no tool begins with _") from error
        return tuple(found)

    def play(self, problem: Problem, chat: Chat) -> Score:
        """An object plays one episode after the other; one that failed is not used again."""
        seed_globally(chat.seed)
        world = self._idle.pop() if self._idle else self._factory()
        score = self.played(world, problem, chat)
        self._idle.append(world)
        return score

    def call(self, world: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        if name in OWN or name not in self._methods:
            raise ValueError(f"Tool {name} not found.")
        return awaited(getattr(world, name)(**arguments))


@dataclass(frozen=True, kw_only=True)
class Agent(EpisodeTask):
    """Episodes of a function `solve(row, base_url, api_key)`, sync or async, which returns the reward, see
    `reward_parts`.
    """

    agent: str

    has_address: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._function

    @cached_property
    def _function(self) -> Any:
        return imported(self.agent, "task.agent", "function")

    def play(self, problem: Problem, chat: Chat) -> Score:
        seed_globally(chat.seed)
        reward = awaited(self._function(row=dict(problem.fields), base_url=chat.base_url, api_key=chat.api_key))
        return total(reward_parts(reward, "episode", f"task.agent={self.agent}"), self.correct_threshold)


def joined(first: Any, second: Any) -> Any:
    """One content of two, in parts where one of them has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second))
    return [part for each in parts for part in each if part.get("text") != ""]


def seed_globally(seed: int) -> None:
    """Of Python and NumPy, so that all episodes of a group see the same, and a resumed run too."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def awaited(value: Any) -> Any:
    """What code of the user's own returns, sync or async."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value
