"""Several tasks in one run, each with its share of the training problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose
from typing import Any

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Chat, Task, TaskFacts
from offline_grpo.task.problems import MANY, LazyProblems
from offline_grpo.types import TASK_MARK, Problem, Score, Split

PERIOD = 1000
"""Training problems after which the order of tasks repeats: shares are met to a thousandth."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Problems of several tasks; ids are those of the tasks after NAME::, by which `score` finds the task.

    The training split goes through the tasks by their weights, evenly, until each problem of each task was there; those
    of a small task come again. The evaluation split has every problem once: the first of each task, then the second of
    each, and so on.
    """

    tasks: Mapping[str, Task]
    weights: Mapping[str, float] | None

    def __post_init__(self) -> None:
        example = "name what to mix, for example +task@task.tasks.easy=arithmetic +task@task.tasks.hard=sat"
        require(bool(self.tasks), "task.tasks", dict(self.tasks), example)
        for name in self.tasks:
            is_good = name and TASK_MARK not in name and "/" not in name
            require(bool(is_good), "task.tasks", repr(name), f"a name may have neither {TASK_MARK} nor /")
        if self.weights is None:
            return
        require(isinstance(self.weights, Mapping), "task.weights", self.weights, "must be null or {NAME: SHARE}")
        weights, fix = dict(self.weights), f"must name exactly the tasks {', '.join(self.tasks)}"
        require(weights.keys() == self.tasks.keys(), "task.weights", weights, fix)
        are_numbers = all(isinstance(each, (int, float)) and each >= 1 / PERIOD for each in weights.values())
        fix = f"must be numbers of at least {1 / PERIOD} that add up to 1, or null for equal shares"
        require(are_numbers and isclose(sum(weights.values()), 1, abs_tol=1e-6), "task.weights", weights, fix)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Lazy; what the tasks read is read here."""
        lengths = {name: len(problems) for name, problems in self._problems[split].items()}
        if split is Split.EVAL:
            return LazyProblems(self._eval_problem, range(min(sum(lengths.values()), MANY)))
        # It ends with the last problem of the task that takes longest.
        places = {name: divmod(length - 1, self._counts[name]) for name, length in lengths.items()}
        last = max(period * PERIOD + self._order.index((name, before)) for name, (period, before) in places.items())
        return LazyProblems(self._train_problem, range(min(1 + last, MANY)))

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
    def _order(self) -> Sequence[tuple[str, int]]:
        """For each position of a period the task that is furthest behind, and how many problems of it came before."""
        weights = self.weights or dict.fromkeys(self.tasks, 1 / len(self.tasks))
        counts = dict.fromkeys(weights, 0)
        order: list[tuple[str, int]] = []
        for position in range(PERIOD):
            name = max(weights, key=lambda each: weights[each] * (position + 1) - counts[each])
            order.append((name, counts[name]))
            counts[name] += 1
        return order

    @cached_property
    def _counts(self) -> Mapping[str, int]:
        return Counter(name for name, _ in self._order)

    def _train_problem(self, position: int) -> Problem:
        period, offset = divmod(position, PERIOD)
        name, before = self._order[offset]
        problems = self._problems[Split.TRAIN][name]
        return _named(name, problems[(period * self._counts[name] + before) % len(problems)])

    def _eval_problem(self, position: int) -> Problem:
        problems = self._problems[Split.EVAL]
        start = 0  # problems of each task that lie behind
        for length in sorted({len(own) for own in problems.values()}):
            left = [name for name, own in problems.items() if len(own) > start]
            if position < (length - start) * len(left):
                name = left[position % len(left)]
                return _named(name, problems[name][start + position // len(left)])
            position -= (length - start) * len(left)
            start = length
        raise IndexError(position)


@contextmanager
def of_task(name: str) -> Iterator[None]:
    """Says which task of a mixture a ConfigError is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"task.tasks.{name}: {error}") from error


def _named(name: str, problem: Problem) -> Problem:
    return replace(problem, problem_id=f"{name}{TASK_MARK}{problem.problem_id}")
