"""Reward functions that a user wrote, by import path: `my_module:my_function`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError, ScoreError, require, told
from offline_grpo.types import Problem, Score

GIVEN = ("prompt", "completion", "answer", "messages", "problem_id")
"""What every reward function may ask for by the names of its parameters, beside the other fields of the row."""

FORM = "def my_function(prompt, completion, answer), which returns a number, True or False, a dict of numbers, or None"

TOLERANCE = 1e-9
"""By how much a reward may miss the threshold: weights such as 0.7, 0.2 and 0.1 do not add up to exactly 1."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of one completion, sync or async. It gets by keyword what its parameters name: see `GIVEN`; `**fields`
    gets the rest.
    """

    path: str
    weight: float
    function: Callable[..., Any]
    required: tuple[str, ...]  # parameters without a default
    accepted: tuple[str, ...] | None  # all parameters; None with **fields

    @property
    def name(self) -> str:
        """What its part of the reward is called."""
        return self.path.rpartition(":")[2]

    def check(self, problem: Problem) -> None:
        """Raise ConfigError if a parameter has no value for this problem."""
        for name in self.required:
            if name not in GIVEN and name not in problem.fields:
                known = ", ".join([*GIVEN, *problem.fields])
                about = f"task.reward={self.path}: there is no value for its parameter {name!r}"
                raise ConfigError(
                    f"{about} in problem {problem.problem_id}; parameters are given by name, from {known}"
                )

    def __call__(self, problem: Problem, text: str) -> Any:
        """What the function returns, to be awaited where it is async."""
        prompt = problem.messages[-1]["content"] if problem.messages else ""
        own = {"prompt": prompt, "completion": text, "answer": problem.answer, "problem_id": problem.problem_id}
        given: dict[str, Any] = {**problem.fields, **own, "messages": [dict(message) for message in problem.messages]}
        taken = {name: value for name, value in given.items() if self.accepted is None or name in self.accepted}
        return self.function(**deepcopy(taken))  # it may change what it gets, which is also the next call's

    def parts(self, value: Any) -> dict[str, float]:
        """What the function returned as weighted parts of the reward: NAME, or NAME/KEY for a dict; none for None.

        Raises:
            ScoreError: it is no number, or not a finite one, or an empty dict.
        """
        is_dict = isinstance(value, Mapping) and len(value) > 0
        values = {f"{self.name}/{key}": number for key, number in value.items()} if is_dict else {self.name: value}
        return {name: self.weight * self._number(number) for name, number in values.items() if number is not None}

    def _number(self, value: Any) -> float:
        number = value.item() if hasattr(value, "item") else value  # of numpy and torch
        if not isinstance(number, Real) or not math.isfinite(number):
            raise ScoreError(f"task.reward={self.path} returned {value!r:.80}; it must be like {FORM}")
        return float(number)


@dataclass(frozen=True, slots=True)
class Rewards:
    """Reward functions whose weighted values are added up. One that returns None does not apply to the completion, and
    is left out; if none applies, the completion is not scored (as TRL has it).

    A completion counts as correct (success_rate, pass@k) if its reward is at least `threshold`, or less by no more than
    rounding.
    """

    functions: tuple[RewardFunction, ...]
    threshold: float

    def check(self, problem: Problem) -> None:
        """Raise ConfigError if a function asks for what this problem does not have."""
        for function in self.functions:
            function.check(problem)

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        """The score of a completion, to be awaited if one of the functions is async.

        Raises:
            ScoreError: a function returned something else than numbers. What it raises is raised.
        """
        values = [function(problem, text) for function in self.functions]
        return self._gathered(values) if any(map(inspect.isawaitable, values)) else self._sum(values)

    async def _gathered(self, values: Sequence[Any]) -> Score:
        async def value_of(value: Any) -> Any:
            return await value if inspect.isawaitable(value) else value

        return self._sum(await asyncio.gather(*map(value_of, values)))

    def _sum(self, values: Sequence[Any]) -> Score:
        pairs = zip(self.functions, values, strict=True)
        parts = {name: part for function, value in pairs for name, part in function.parts(value).items()}
        if not parts:
            return Score.unscored()
        reward = math.fsum(parts.values())
        is_correct = reward >= self.threshold - TOLERANCE * max(1.0, abs(self.threshold))
        return Score(reward=reward, is_correct=is_correct, parts=parts)


def load_rewards(setting: Any, threshold: float) -> Rewards:
    """The functions that `task.reward` names: `my_module:my_function`, or a list of such names and of `{fn: NAME,
    weight: NUMBER}`.

    Raises:
        ConfigError: the setting has another form, or names what cannot be imported or called.
    """
    items = setting if isinstance(setting, list) else [setting]
    functions = tuple(_load(item) for item in items)
    names = [function.name for function in functions]
    require(bool(functions), "task.reward", "[]", "name a function, my_module:my_function, or set it to null")
    fix = "two functions have the same name, and each is a part of the reward"
    require(len(set(names)) == len(names), "task.reward", setting, fix)
    return Rewards(functions, threshold)


def _load(item: Any) -> RewardFunction:
    fields = item if isinstance(item, Mapping) else {"fn": item}
    path, weight = fields.get("fn"), fields.get("weight", 1.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
    if not isinstance(path, str) or not is_number or set(fields) - {"fn", "weight"}:
        fix = "write my_module:my_function, or {fn: my_module:my_function, weight: 0.5}"
        raise ConfigError(f"task.reward={item}: {fix}")
    function = _imported(path)
    parameters = list(inspect.signature(function).parameters.values())
    is_named = not inspect.isclass(function) and all(p.kind is not p.POSITIONAL_ONLY for p in parameters)
    require(is_named, "task.reward", path, f"is not a function with named parameters; write {FORM}")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = tuple(p.name for p in named if p.default is p.empty)
    return RewardFunction(path, float(weight), function, required, None if takes_all else tuple(p.name for p in named))


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name.isidentifier() or module_name.endswith(".py") or "/" in module_name:
        raise ConfigError(f"task.reward={path}: write it as my_module:my_function, for a function in my_module.py")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does, such as a script's sys.exit()
        looked = f"{module_name} was looked for in {Path.cwd()} and among the installed packages"
        raise ConfigError(f"task.reward={path}: cannot be imported ({told(error)}); {looked}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = ", ".join(name for name, value in vars(module).items() if inspect.isfunction(value)) or "none"
        file = getattr(module, "__file__", module_name)
        raise ConfigError(f"task.reward={path}: {file} has no function {function_name}; it has {known}")
    return function
