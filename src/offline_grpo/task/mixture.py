"""Several tasks in one run, each with its share of the training problems."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isclose
from typing import Any

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Chat, Task, TaskFacts
from offline_grpo.task.problems import MANY, BaseTask, LazyProblems
from offline_grpo.types import TASK_MARK, Problem, Score, Split

PERIOD = 1000
"""Training problems after which the order of tasks repeats: shares are met to a thousandth."""


@dataclass(frozen=True, kw_only=True)
class Mixture(BaseTask):
    """Problems of several tasks; ids are those of the tasks after NAME::, by which `score` finds the task.

    The training split goes through the tasks by their weights, evenly, until each problem of each task was there; those
    of a small task come again. The evaluation split has every problem once: the first of each task, then the second of
    each, and so on.
    """

    tasks: Mapping[str, Task]
    weights: Mapping[str, float] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        example = "name what to mix, for example +task@task.tasks.easy=arithmetic +task@task.tasks.hard=sat"
        self.check("tasks", bool(self.tasks), example)
        for name in self.tasks:
            is_good = bool(name) and TASK_MARK not in name and "/" not in name
            self.check("tasks", is_good, f"the name {name!r} may have neither {TASK_MARK} nor /")
        if self.weights is None:
            return
        self.check("weights", isinstance(self.weights, Mapping), "must be null or {NAME: SHARE}")
        is_whole = self.weights.keys() == self.tasks.keys()
        self.check("weights", is_whole, f"must name exactly the tasks {', '.join(self.tasks)}")
        are_numbers = all(isinstance(each, (int, float)) and each >= 1 / PERIOD for each in self.weights.values())
        fix = f"must be numbers of at least {1 / PERIOD} that add up to 1, or null for equal shares"
        self.check("weights", are_numbers and isclose(sum(self.weights.values()), 1, abs_tol=1e-6), fix)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Lazy; what the tasks read is read here."""
        lengths = {name: len(problems) for name, problems in self._problems[split].items()}
        if split is Split.EVAL:
            return LazyProblems(partial(self._problem, split), range(min(sum(lengths.values()), MANY)))
        # Training ends with the last problem of the task that takes longest.
        order, counts = self._period
        places = {name: divmod(length - 1, counts[name]) for name, length in lengths.items()}
        last = max(period * PERIOD + order.index((name, before)) for name, (period, before) in places.items())
        return LazyProblems(partial(self._problem, split), range(min(1 + last, MANY)))

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        task, own = self._own(problem)
        return task.score(own, text)

    def play(self, problem: Problem, chat: Chat) -> Score:
        task, own = self._own(problem)
        return task.play(own, chat)

    def _own(self, problem: Problem) -> tuple[Any, Problem]:
        """The problem's task, and the problem as that made it."""
        name, _, problem_id = problem.problem_id.partition(TASK_MARK)
        return self.tasks[name], replace(problem, problem_id=problem_id)

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[Score] | Awaitable[list[Score]]:
        task, own = self._own(problem)
        if not TaskFacts.of(task).rewards_groups:
            return [Score.unscored()] * len(texts)
        return task.score_group(own, texts)

    @cached_property
    def _problems(self) -> Mapping[Split, Mapping[str, Sequence[Problem]]]:
        found: dict[Split, dict[str, Sequence[Problem]]] = {split: {} for split in Split}
        for name, task in self.tasks.items():
            with of_task(name):
                for split in Split:
                    found[split][name] = task.problems(split)
        return found

    @cached_property
    def _period(self) -> tuple[Sequence[tuple[str, int]], Mapping[str, int]]:
        """For each position of a period the task that is furthest behind, and how many problems of it came before; and
        how many come in all.
        """
        weights = self.weights or dict.fromkeys(self.tasks, 1 / len(self.tasks))
        counts = dict.fromkeys(weights, 0)
        order: list[tuple[str, int]] = []
        for position in range(PERIOD):
            name = max(weights, key=lambda each: weights[each] * (position + 1) - counts[each])
            order.append((name, counts[name]))
            counts[name] += 1
        return order, counts

    def _problem(self, split: Split, position: int) -> Problem:
        problems = self._problems[split]
        if split is Split.TRAIN:
            period, offset = divmod(position, PERIOD)
            (name, before), counts = self._period[0][offset], self._period[1]
            index = (period * counts[name] + before) % len(problems[name])
        else:
            # In turn, by stretches between the ends of two tasks: those that are longer are left in each.
            start = 0  # problems of each task that lie behind
            ends = iter(sorted({len(own) for own in problems.values()}))
            left, end = list(problems), next(ends)
            while position >= (end - start) * len(left):
                position -= (end - start) * len(left)
                start, end = end, next(ends)
                left = [name for name, own in problems.items() if len(own) > start]
            name, index = left[position % len(left)], start + position // len(left)
        found = problems[name][index]
        return replace(found, problem_id=f"{name}{TASK_MARK}{found.problem_id}")


@contextmanager
def of_task(name: str) -> Iterator[None]:
    """Says which task of a mixture a ConfigError is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"task.tasks.{name}: {error}") from error
