"""Which training problems come next, where `data.pass_rate` keeps those that are neither too easy nor too hard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offline_grpo.errors import require
from offline_grpo.types import Metrics, Problem, RolloutGroup

log = logging.getLogger(__name__)

Seen = Mapping[str, tuple[float, float, int]]
"""Problem id -> right answers and scored completions, as they counted in an iteration."""


class _Choice(NamedTuple):
    """The problems of an iteration (indices), what was known then, and where the walk ended."""

    indices: list[int]
    seen: Seen
    end: int
    num_passed_over: int
    num_outside: int


@dataclass(kw_only=True)
class Curriculum:
    """Walks through an endless order of problems, and passes over those whose pass rate is known and outside `band`.

    A pass rate is the share of right answers among a problem's scored completions. With each iteration, both count
    `decay` times as much; a problem of which less than one completion is left comes again.

    Every process has the same one: it sees the groups of all.

    Args:
        index_at: the problem at a position of the order.
        store: the record (`data.pass_rate_from`) that pass rates are of; None: this run.
    """

    problems: Sequence[Problem]
    index_at: Callable[[int], int]
    count: int
    band: Sequence[float]
    decay: float
    store: str | None

    _seen: Seen = field(default_factory=dict, init=False)
    _position: int = field(default=0, init=False)
    _choices: dict[int, _Choice] = field(default_factory=dict, init=False)  # of iterations that are not trained yet
    metrics: Metrics = field(default_factory=dict, init=False)

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Continue from what `state_dict` returned, which has the pass rates of the store too.

        Raises:
            ConfigError: the store knows none of these problems, or has all of them outside the band.
        """
        self._position = iteration * self.count
        if state:
            self._position = state["position"]
            self._seen = {name: (right, total, at) for name, (right, total, at) in state["seen"].items()}
        elif self.store is not None:
            self._seen = recorded(self.store)
        if self.store is not None:
            known = sum(problem.problem_id in self._seen for problem in self.problems)
            num_kept = sum(self.keeps(index, iteration) for index in range(len(self.problems)))
            fix = "has no rollouts of this task's training problems; name a run of this task"
            require(known > 0, "data.pass_rate_from", self.store, fix)
            fix = f"none of the {known:,} problems has a pass rate in it; widen it"
            require(num_kept > 0, "data.pass_rate", self.band, fix)
            about = f"{known:,} of {len(self.problems):,} training problems are on record"
            log.info("data.pass_rate=%s: %s; %d are left, with those that are not", self.band, about, num_kept)

    def choose(self, iteration: int) -> list[int]:
        """The problems of an iteration; the same however often it is asked. Where fewer than needed are in the band,
        others fill up.
        """
        if iteration not in self._choices:
            start = max([self._position, *(choice.end for choice in self._choices.values())])
            inside: list[int] = []
            outside: list[int] = []
            while len(inside) < self.count and len(inside) + len(outside) < len(self.problems):
                index = self.index_at(start + len(inside) + len(outside))
                (inside if self.keeps(index, iteration) else outside).append(index)
            walked = [*inside, *outside]
            indices = [walked[i % len(walked)] for i in range(self.count)]
            in_band = {*inside}
            num_outside = sum(index not in in_band for index in indices)
            if num_outside and not self.metrics.get("curriculum/num_outside"):
                fix = "curriculum/num_outside counts those that fill up"
                words = "data.pass_rate=%s: only %d problems of iteration %d are in it; %s"
                log.warning(words, self.band, len(inside), iteration + 1, fix)
            passed_over = max(len(outside) - num_outside, 0)
            self._choices[iteration] = _Choice(indices, self._seen, start + len(walked), passed_over, num_outside)
        return self._choices[iteration].indices

    def keeps(self, index: int, iteration: int) -> bool:
        """Whether a problem is in the band, or its pass rate unknown, as of when this iteration was chosen."""
        seen = self._choices[iteration].seen if iteration in self._choices else self._seen
        right, total = self._counts(seen, self.problems[index].problem_id, iteration)
        return total < 1 or self.band[0] - 1e-9 <= right / total <= self.band[1] + 1e-9

    def sampled(self, iteration: int, groups: Sequence[RolloutGroup]) -> None:
        """Learn from an iteration's groups, of all processes, and from those that they replaced."""
        choice = self._choices[iteration]
        self._choices = {i: each for i, each in self._choices.items() if i > iteration}
        self._position = choice.end
        names = ("curriculum/num_passed_over", "curriculum/num_outside")
        self.metrics = dict(zip(names, (float(choice.num_passed_over), float(choice.num_outside)), strict=True))
        if self.store is None:
            seen = dict(self._seen)  # what choices refer to stays
            for name, right, total in (each for group in groups for each in (*group.discarded, outcome(group))):
                before = self._counts(seen, name, iteration)
                seen[name] = (before[0] + right, before[1] + total, iteration)
            self._seen = seen

    def state_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"position": self._position, "seen": {name: list(counts) for name, counts in self._seen.items()}}

    def _counts(self, seen: Seen, name: str, iteration: int) -> tuple[float, float]:
        right, total, at = seen.get(name, (0.0, 0.0, iteration))
        weight = 1.0 if self.store is not None else self.decay ** (iteration - at)
        return right * weight, total * weight


def outcome(group: RolloutGroup) -> tuple[str, int, int]:
    """Problem id, right answers, scored completions."""
    assert group.problem is not None
    right = [rollout.score.is_correct for rollout in group.rollouts if rollout.score.failure is None]
    return group.problem.problem_id, sum(right), len(right)


def recorded(store: str) -> Seen:
    """The pass rates of a store's training rollouts. Raises ConfigError where there is none."""
    from offline_grpo.rollouts.store.reader import shards_of  # pyarrow

    columns = ["phase", "problem_id", "is_correct", "failure"]
    found: dict[str, tuple[float, float, int]] = {}
    for shard in shards_of(Path(store).expanduser(), key="data.pass_rate_from", phase="train"):
        table = shard.table(columns)
        for phase, name, is_correct, failure in zip(*(table[each].to_pylist() for each in columns), strict=True):
            if phase == "train" and name is not None and failure is None:
                right, total, _ = found.get(name, (0.0, 0.0, 0))
                found[name] = (right + is_correct, total + 1, 0)
    return found
