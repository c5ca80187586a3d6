"""Any generator of Reasoning Gym (arXiv 2505.24760): more than a hundred kinds of problems, each with a scorer of its
own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, ClassVar, cast

from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.installed import install_command
from offline_grpo.settings import Range, at_least, one_of
from offline_grpo.task.answers import last_plain_number, last_tagged
from offline_grpo.task.problems import BaseTask, LazyProblems, SystemPrompt, Weight, asked
from offline_grpo.types import Problem, Score, Split

MAX_PROBLEMS = 1_000_000
NUMBER = Range(f"must be from 1 to {MAX_PROBLEMS:,}", lambda value: 0 < value <= MAX_PROBLEMS)
LEVELS = Range("must be numbers from 0 on such as [0,1,2]", lambda levels: min(levels, default=-1) >= 0)
SEED = Range("must be from 0 to 2147483647", lambda value: 0 <= value < 2**31)
SEED_OF_SPLIT = {Split.TRAIN: 0, Split.EVAL: MAX_PROBLEMS}
"""The library seeds item i with seed + i, so that the splits' seeds must lie further apart than their items."""

ANSWERS: dict[str, Callable[[str], str | None]] = {
    "tag": lambda text: None if (block := last_tagged(text, "answer")) is None else block.content,
    "last_number": last_plain_number,
    "last_word": lambda text: next(reversed(re.findall(r"[^\W_][\w'-]*", text)), None),
    "completion": str,
}
"""`answer_in` -> the answer in a completion."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(BaseTask):
    """Problems of one generator. The answer is what `answer_in` says of a completion. `Score.parts`:

        correct     what the generator's scorer says, from 0 to 1; below 1 the answer counts as wrong, also where it
                    earns something
        format      `format_weight` if there is an answer

    With `levels`, training goes through them, `problems_per_level` problems each, and stays at the last one; the
    evaluation has as many of each. A problem's level is a function of its number alone.
    """

    name: str
    settings: Mapping[str, Any] | None
    levels: Annotated[Sequence[int] | None, LEVELS]
    problems_per_level: Annotated[int, at_least(1)]
    num_train: Annotated[int, NUMBER]
    num_eval: Annotated[int, NUMBER]
    seed: Annotated[int, SEED]
    system_prompt: SystemPrompt
    format_weight: Weight
    answer_in: Annotated[str, one_of(*ANSWERS)]

    _made: dict[tuple[Split, int | None], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    worker_imports: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("name", bool(self.name), "name a generator of Reasoning Gym, such as leg_counting")
        self.check("name", self.name != "composite", "use task=mixture, which mixes generators and other tasks")
        is_free = {"seed", "size"}.isdisjoint(self.settings or {})
        self.check("settings", is_free, "seed and size are task.seed, task.num_train and task.num_eval")

    @property
    def is_ordered(self) -> bool:
        return self.levels is not None

    def problems(self, split: Split) -> LazyProblems:
        self._items(split, 0)  # what cannot be made is said now
        return LazyProblems(partial(self._problem, split), range(getattr(self, f"num_{split}")))

    def score(self, problem: Problem, text: str) -> Score:
        """The generator makes the problem again, because its scorer wants to see it."""
        answer = ANSWERS[self.answer_in](text)
        if answer is None:
            return Score(0.0, False, {"correct": 0.0, "format": 0.0})
        split, _, index = problem.problem_id.partition("-")
        items, _ = self._items(Split(split), int(index))
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
        items, level = self._items(split, index)
        item = items[index]
        answer = item["answer"]  # None where a problem has many
        fields = {} if level is None else {"level": level}
        messages = asked(item["question"], self.system_prompt)
        return Problem(f"{split}-{index}", messages, "" if answer is None else str(answer), fields)

    def _items(self, split: Split, index: int) -> tuple[Any, int | None]:
        """The generator's data set of a problem's level, and the level. Its item i has the same question for the same
        seed.
        """
        level = None
        if self.levels is not None:
            in_order = min(index // self.problems_per_level, len(self.levels) - 1)
            level = self.levels[index % len(self.levels) if split is Split.EVAL else in_order]
        if (split, level) in self._made:
            return self._made[split, level], level
        try:
            from reasoning_gym.factory import CURRICULA, DATASETS
        except ImportError as error:
            raise ConfigError(f"task=reasoning_gym: needs {install_command('reasoning-gym')} ({error})") from error
        # The generator, and its settings: those of a level, or its own ones, with what the task changes.
        if self.name not in DATASETS:
            near = get_close_matches(self.name, DATASETS, n=3, cutoff=0)
            raise ConfigError(f"task.name={self.name}: Reasoning Gym has no such generator; near are {', '.join(near)}")
        kind, settings_class = DATASETS[self.name]
        curricula = cast(Mapping[str, Any], CURRICULA)  # classes, whatever their annotation says
        if level is not None and self.name not in curricula:
            raise ConfigError(f"task.levels={self.levels}: {self.name} has no curriculum; set task.levels=null")
        own = {"seed": self.seed + SEED_OF_SPLIT[split], "size": getattr(self, f"num_{split}")}
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
        return self._made[split, level], level
