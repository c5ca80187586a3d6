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
from typing import Any, TypeVar

from offline_grpo.errors import ConfigError, ScoreError, require, told
from offline_grpo.types import Problem, Score, text_of

T = TypeVar("T")

REWARD, GROUP = "task.reward", "task.group_reward"
GIVEN = ("prompt", "completion", "answer", "messages", "problem_id", "images")
"""What a function may ask for by the names of its parameters, `answer` where there is one, `images`, the bytes of each
picture's file; and fields of the row.
"""

GIVEN_OF_GROUP = ("prompts", "completions", "answers", "messages", "problem_ids", "images")
"""The same of a function that rewards a whole group. All are lists with an item per completion, other fields too."""

REWARD_FORM = "a number, True or False, a dict of numbers, or None"
FORMS = {
    REWARD: f"like def my_function(prompt, completion, answer), which returns {REWARD_FORM}",
    GROUP: "like def my_function(prompts, completions, answers), which returns a number or None for each completion",
}

TOLERANCE = 1e-9
"""By how much a reward may miss the threshold: weights such as 0.7, 0.2 and 0.1 do not add up to exactly 1."""


def reward_parts(value: object, name: str, source: str, form: str = REWARD_FORM) -> dict[str, float]:
    """What code of the user's own returned as a reward, by name: a number, also of numpy or torch, is the part `name`;
    those of a dict have its keys; None is no part.

    Raises:
        ScoreError: it is no finite number, or an empty dict. The message begins with `source`.
    """
    values: Mapping[Any, Any] = value if isinstance(value, Mapping) and value else {name: value}
    plain = {key: each.item() if hasattr(each, "item") else each for key, each in values.items()}
    found = {str(key).encode(errors="replace").decode(): each for key, each in plain.items()}
    for each in found.values():
        if each is not None and not (isinstance(each, Real) and math.isfinite(each)):
            raise ScoreError(f"{source} returned {value!r:.80}; it must be {form}")
    return {key: float(each) for key, each in found.items() if isinstance(each, Real)}


def total(parts: Mapping[str, float], threshold: float, measured: Mapping[str, float] | None = None) -> Score:
    """The score whose reward is the sum of its parts; without a part it is not scored. It counts as correct if the
    reward is at least `threshold`, or less by no more than rounding.
    """
    if not parts:
        return Score.unscored()
    reward = math.fsum(parts.values())
    is_correct = reward >= threshold - TOLERANCE * max(1.0, abs(threshold))
    return Score(reward, is_correct, parts, measured=measured or {})


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of one completion, or of a group, sync or async. It gets by keyword what its parameters name: see
    `GIVEN`; `**fields` gets the rest.
    """

    key: str  # the setting that names it, `task.reward` or `task.group_reward`
    path: str
    name: str  # what its part of the reward is called, or, of a dict, what begins the names of its parts
    weight: float
    function: Callable[..., Any]
    required: tuple[str, ...]  # parameters without a default
    accepted: tuple[str, ...] | None  # all parameters; None with **fields

    def __call__(self, problem: Problem, text: str | Sequence[str]) -> Any:
        """What the function returns for a completion, or for those of a group, to be awaited where it is async."""
        # By these names in the singular for a completion, in the plural for a group, of which each has an item.
        plural = "" if isinstance(text, str) else "s"
        prompt = text_of(problem.messages[-1]) if problem.messages else ""
        own = {f"prompt{plural}": prompt, f"problem_id{plural}": problem.problem_id}
        own |= {f"answer{plural}": problem.answer} if problem.answer else {}
        own |= {"messages": [dict(message) for message in problem.messages]}
        of_row = {"images": [picture.data for picture in problem.pictures], **problem.fields, **own}
        if isinstance(text, str):
            given = {**of_row, "completion": text}
        else:
            given = {name: [value] * len(text) for name, value in of_row.items()} | {"completions": list(text)}
        taken = {name: value for name, value in given.items() if self.accepted is None or name in self.accepted}
        return self.function(**deepcopy(taken))  # it may change what it gets, which is also the next call's


@dataclass(frozen=True, slots=True)
class Rewards:
    """Reward functions whose weighted values are added up. One that returns None does not apply to the completion, and
    is left out; if none applies, the completion is not scored (as TRL has it).

    A completion counts as correct (success_rate, pass@k) as `total` says.
    """

    functions: tuple[RewardFunction, ...]
    threshold: float

    def check(self, problem: Problem) -> None:
        """Raise ConfigError if a function has a parameter for which this problem has no value."""
        for function in self.functions:
            names = GIVEN if function.key == REWARD else GIVEN_OF_GROUP
            given = [name for name in names if problem.answer or name not in ("answer", "answers")]
            for name in function.required:
                if name not in given and name not in problem.fields:
                    known = ", ".join([*given, *problem.fields])
                    fix = "; with a default (answer=None) rows need no task.answer_field" if name in names else ""
                    about = f"there is no value for its parameter {name!r} in problem {problem.problem_id}"
                    fix = f"parameters are given by name, from {known}{fix}"
                    raise ConfigError(f"{function.key}={function.path}: {about}; {fix}")

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        """The score of a completion, to be awaited if one of the functions is async. Raises what they raise, and
        ScoreError for what is no number.
        """
        return self._finished([function(problem, text) for function in self.functions], self._sum)

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[Score] | Awaitable[list[Score]]:
        """The same for the completions of a group, of functions that reward groups."""

        def sums(values: Sequence[Any]) -> list[Score]:
            rows = []
            for function, value in zip(self.functions, values, strict=True):
                row = value.tolist() if hasattr(value, "tolist") else value  # of numpy and torch
                if not isinstance(row, Sequence) or len(row) != len(texts):
                    about = f"{function.key}={function.path} returned {value!r:.80} for {len(texts)} completions"
                    raise ScoreError(f"{about}; it must be {FORMS[GROUP]}")
                rows.append(row)
            return list(map(self._sum, zip(*rows, strict=True)))

        return self._finished([function(problem, texts) for function in self.functions], sums)

    def _finished(self, values: Sequence[Any], finish: Callable[[Sequence[Any]], T]) -> T | Awaitable[T]:
        async def gathered() -> T:
            found = iter(await asyncio.gather(*filter(inspect.isawaitable, values)))
            return finish([next(found) if inspect.isawaitable(value) else value for value in values])

        return gathered() if any(map(inspect.isawaitable, values)) else finish(values)

    def _sum(self, values: Sequence[object]) -> Score:
        parts: dict[str, float] = {}
        for function, value in zip(self.functions, values, strict=True):
            if isinstance(value, Mapping):
                value = {f"{function.name}/{key}": each for key, each in value.items()}
            own = reward_parts(value, function.name, f"{function.key}={function.path}", FORMS[function.key])
            parts |= {name: function.weight * number for name, number in own.items()}
        return total(parts, self.threshold)


def load_rewards(setting: Any, threshold: float, key: str = REWARD) -> Rewards:
    """The functions that `task.reward` or `task.group_reward` names: `my_module:my_function`, or a list of such names
    and of `{fn: NAME, weight: NUMBER}`. Raises ConfigError for another form, and for what cannot be imported or called.
    """
    functions = []
    for item in setting if isinstance(setting, list) else [setting]:
        fields = item if isinstance(item, Mapping) else {"fn": item}
        path, weight = fields.get("fn"), fields.get("weight", 1.0)
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
        if not isinstance(path, str) or not is_number or set(fields) - {"fn", "weight"}:
            fix = "write my_module:my_function, or {fn: my_module:my_function, weight: 0.5}"
            raise ConfigError(f"{key}={item}: {fix}")
        function = imported(path, key, "function")
        # What it wants by name.
        parameters = list(inspect.signature(function).parameters.values())
        is_named = not inspect.isclass(function) and all(p.kind is not p.POSITIONAL_ONLY for p in parameters)
        require(is_named, key, path, f"is not a function with named parameters; write one {FORMS[key]}")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = tuple(p.name for p in named if p.default is p.empty)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        accepted = None if takes_all else tuple(p.name for p in named)
        name = path.rpartition(":")[2]
        functions.append(RewardFunction(key, path, name, float(weight), function, required, accepted))
    names = [function.name for function in functions]
    require(bool(functions), key, "[]", "name a function, my_module:my_function, or set it to null")
    fix = "two functions have the same name, and each is a part of the reward"
    require(len(set(names)) == len(names), key, setting, fix)
    return Rewards(tuple(functions), threshold)


def imported(path: str, key: str, kind: str) -> Callable[..., Any]:
    """The class or function that a setting names. Raises ConfigError where there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier() or module_name.endswith(".py") or "/" in module_name:
        raise ConfigError(f"{key}={path}: write it as my_module:my_{kind}, for a {kind} in my_module.py")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does, such as a script's sys.exit()
        looked = f"{module_name} was looked for in {Path.cwd()} and among the installed packages"
        raise ConfigError(f"{key}={path}: cannot be imported ({told(error)}); {looked}") from error
    found = getattr(module, name, None)
    if not callable(found):
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        known = ", ".join(name for name, value in vars(module).items() if is_kind(value)) or "none"
        file = getattr(module, "__file__", module_name)
        raise ConfigError(f"{key}={path}: {file} has no {kind} {name}; it has {known}")
    return found
