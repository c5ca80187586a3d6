"""Any generator of Reasoning Gym (arXiv 2505.24760): more than a hundred kinds of problems, each with a scorer of its
own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from math import inf
from typing import Any, ClassVar, cast

from offline_grpo.errors import ConfigError, ScoreError, require
from offline_grpo.task.answers import last_number, last_tagged
from offline_grpo.task.problems import LazyProblems, asked, check_system_prompt
from offline_grpo.types import Problem, Score, Split

MAX_PROBLEMS = 1_000_000
SEED_OF_SPLIT = {Split.TRAIN: 0, Split.EVAL: MAX_PROBLEMS}
"""The library seeds item i with seed + i, so that the splits' seeds must lie further apart than their items."""


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "tag": lambda text: None if (block := last_tagged(text, "answer")) is None else block.content,
    "last_number": lambda text: None if (number := last_number(text)) is None else number.replace(",", ""),
    "last_word": lambda text: next(reversed(re.findall(r"[^\W_][\w'-]*", text)), None),
    "completion": str,
}
"""`answer_in` -> the answer in a completion."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """Problems of one generator. The answer is what `answer_in` says of a completion. `Score.parts`:

        correct     what the generator's scorer says, from 0 to 1; below 1 the answer counts as wrong, also where it
                    earns something
        format      `format_weight` if there is an answer

    With `levels`, training goes through them, `problems_per_level` problems each, and stays at the last one; the
    evaluation has as many of each. A problem's level is a function of its number alone.
    """

    name: str
    settings: Mapping[str, Any] | None
    levels: Sequence[int] | None
    problems_per_level: int
    num_train: int
    num_eval: int
    seed: int
    system_prompt: str | None
    format_weight: float
    answer_in: str

    worker_imports: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    def __post_init__(self) -> None:
        name, weight, per_level = self.name, self.format_weight, self.problems_per_level
        require(bool(name), "task.name", repr(name), "name a generator of Reasoning Gym, such as leg_counting")
        require(name != "composite", "task.name", name, "use task=mixture, which mixes generators and other tasks")
        for key in ("num_train", "num_eval"):
            num = getattr(self, key)
            require(0 < num <= MAX_PROBLEMS, f"task.{key}", num, f"must be from 1 to {MAX_PROBLEMS:,}")
        require(per_level > 0, "task.problems_per_level", per_level, "must be at least 1")
        require(0 <= self.seed < 2**31, "task.seed", self.seed, "must be from 0 to 2147483647")
        require(0 <= weight < inf, "task.format_weight", weight, "must be at least 0")
        require(self.answer_in in ANSWERS, "task.answer_in", self.answer_in, f"must be one of {', '.join(ANSWERS)}")
        check_system_prompt(self.system_prompt)
        levels = self.levels is None or (len(self.levels) > 0 and min(self.levels) >= 0)
        require(levels, "task.levels", self.levels, "must be null, or numbers from 0 on such as [0,1,2]")
        own = sorted({"seed", "size"} & (self.settings or {}).keys())
        require(not own, "task.settings", own, "is set by task.seed, task.num_train and task.num_eval")

    @property
    def is_ordered(self) -> bool:
        return self.levels is not None

    def problems(self, split: Split) -> LazyProblems:
        self._items(split, self._level(split, 0))  # what cannot be made is said now
        return LazyProblems(partial(self._problem, split), range(self._num(split)))

    def score(self, problem: Problem, text: str) -> Score:
        """The generator makes the problem again, because its scorer wants to see it."""
        answer = ANSWERS[self.answer_in](text)
        if answer is None:
            return Score(0.0, False, {"correct": 0.0, "format": 0.0})
        split, _, index = problem.problem_id.partition("-")
        items = self._items(Split(split), self._level(Split(split), int(index)))
        item = items[int(index)]
        if not any(item["question"] in message["content"] for message in problem.messages):
            about = f"task.name={self.name}: made again to be scored, problem {problem.problem_id}"
            fix = "set PYTHONHASHSEED=0 in the environment of the run, if it depends on the order of sets"
            raise ScoreError(f"{about} is not the one that was asked; {fix}")
        try:
            correctness = min(max(float(items.score_answer(answer.strip(), item)), 0.0), 1.0)
        except Exception:  # whatever a scorer raises at an answer that it cannot read
            log.debug("%s cannot read the answer %r", self.name, answer, exc_info=True)
            correctness = 0.0
        parts = {"correct": correctness, "format": self.format_weight}
        return Score(reward=sum(parts.values()), is_correct=correctness >= 1, parts=parts)

    def _problem(self, split: Split, index: int) -> Problem:
        level = self._level(split, index)
        item = self._items(split, level)[index]
        answer = item["answer"]  # None where a problem has many
        fields = {} if level is None else {"level": level}
        messages = asked(item["question"], self.system_prompt)
        return Problem(f"{split}-{index}", messages, "" if answer is None else str(answer), fields)

    def _num(self, split: Split) -> int:
        return self.num_train if split is Split.TRAIN else self.num_eval

    def _level(self, split: Split, index: int) -> int | None:
        if self.levels is None:
            return None
        if split is Split.EVAL:
            return self.levels[index % len(self.levels)]
        return self.levels[min(index // self.problems_per_level, len(self.levels) - 1)]

    @cached_property
    def _made(self) -> dict[tuple[Split, int | None], Any]:
        return {}

    def _items(self, split: Split, level: int | None) -> Any:
        """The generator's data set, of which item i has the same question for the same seed."""
        if (split, level) in self._made:
            return self._made[split, level]
        try:
            from reasoning_gym.factory import CURRICULA, DATASETS
        except ImportError as error:
            raise ConfigError(f"task=reasoning_gym: needs uv sync --extra reasoning-gym ({error})") from error
        if self.name not in DATASETS:
            near = get_close_matches(self.name, DATASETS, n=3, cutoff=0)
            raise ConfigError(f"task.name={self.name}: Reasoning Gym has no such generator; near are {', '.join(near)}")
        kind, settings_class = DATASETS[self.name]
        curricula = cast(Mapping[str, Any], CURRICULA)  # classes, whatever their annotation says
        if level is not None and self.name not in curricula:
            raise ConfigError(f"task.levels={self.levels}: {self.name} has no curriculum; set task.levels=null")
        own = {"seed": self.seed + SEED_OF_SPLIT[split], "size": self._num(split)}
        try:
            if level is None:
                settings = settings_class()
            else:
                curriculum = curricula[self.name]()
                for name, attribute in curriculum.attributes.items():  # some have fewer levels
                    curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
                settings = curriculum.generate_configuration()
            settings = replace(settings, **own, **self.settings or {})
            if hasattr(settings, "validate"):  # two generators have no such method
                settings.validate()
            self._made[split, level] = kind(config=settings)
        except (TypeError, ValueError, AssertionError) as error:
            about = f"task.settings={self.settings}, task.levels={self.levels}: {self.name} refuses them"
            raise ConfigError(f"{about} (level {level}): {str(error) or repr(error)}") from error
        return self._made[split, level]
