"""Which training problems come next, where `data.pass_rate` keeps those that are neither too easy nor too hard."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from offline_grpo.errors import require
from offline_grpo.types import Message, Metrics, Problem, RolloutGroup

log = logging.getLogger(__name__)

Seen = Mapping[str, tuple[float, float, int]]
"""`problem_key` -> right answers and scored completions, as they counted in an iteration."""


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
        """Continue from what `state_dict` returned, which has the pass rates of the store too."""
        # Where the walk goes on, and what is known: from the checkpoint, or from a record.
        self._position = iteration * self.count
        if state:
            self._position = state["position"]
            self._seen = {name: (right, total, at) for name, (right, total, at) in state["seen"].items()}
        elif self.store is not None:
            self._seen = recorded(self.store)
        # A record must be of this task, and leave something to train on.
        if self.store is not None:
            own, on_record = {*self._keys}, self._seen.keys()
            known, num_others = len(own & on_record), len(on_record - own)
            found = f"{known:,} of the {len(own):,} training problems, by prompt and answer, and {num_others:,} others"
            is_alike = 0 < 2 * known >= min(len(own), len(on_record))
            require(is_alike, "data.pass_rate_from", self.store, f"has {found}; name a run of this task")
            num_kept = sum(self.keeps(index, iteration) for index in range(len(self.problems)))
            fix = f"none of the {known:,} problems has a pass rate in it; widen it"
            require(num_kept > 0, "data.pass_rate", self.band, fix)
            log.info("data.pass_rate=%s leaves %d, with those not on record, which has %s", self.band, num_kept, found)

    def choose(self, iteration: int) -> list[int]:
        """The problems of an iteration; the same however often it is asked. Where fewer than needed are in the band,
        others fill up.
        """
        if iteration not in self._choices:
            # Walk on until enough problems are in the band, or each was looked at once.
            position = max([self._position, *(choice.end for choice in self._choices.values())])
            inside: list[int] = []
            outside: list[int] = []
            known: set[int] = set()
            while len(inside) < self.count and len(known) < len(self.problems):
                index = self.index_at(position)
                position += 1
                if index not in known:  # else the next pass brings it again
                    known.add(index)
                    (inside if self.keeps(index, iteration) else outside).append(index)
            # Those outside the band fill up what is missing.
            walked = [*inside, *outside]
            indices = [walked[i % len(walked)] for i in range(self.count)]
            num_outside = sum(i % len(walked) >= len(inside) for i in range(self.count))
            if num_outside and not self.metrics.get("curriculum/num_outside"):
                fix = "curriculum/num_outside counts those that fill up"
                words = "data.pass_rate=%s: only %d problems of iteration %d are in it; %s"
                log.warning(words, self.band, len(inside), iteration + 1, fix)
            passed_over = max(len(outside) - num_outside, 0)
            self._choices[iteration] = _Choice(indices, self._seen, position, passed_over, num_outside)
        return self._choices[iteration].indices

    def keeps(self, index: int, iteration: int) -> bool:
        """Whether a problem is in the band, or its pass rate unknown, as of when this iteration was chosen."""
        seen = self._choices[iteration].seen if iteration in self._choices else self._seen
        right, total = self._counts(seen, self._keys[index], iteration)
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

    @cached_property
    def _keys(self) -> list[str]:
        return list(map(problem_key, self.problems))

    def _counts(self, seen: Seen, name: str, iteration: int) -> tuple[float, float]:
        right, total, at = seen.get(name, (0.0, 0.0, iteration))
        weight = 1.0 if self.store is not None else self.decay ** (iteration - at)
        return right * weight, total * weight


def problem_key(problem: Problem) -> str:
    """Equal for problems with the same prompt and answer, and for episodes of the same row, wherever the rows stand."""
    return _key(problem.messages, problem.answer, None if problem.rules is None else problem.fields)


def _key(messages: Sequence[Message], answer: str, row: Mapping[str, Any] | None) -> str:
    text = json.dumps([[*map(dict, messages)], answer, row and dict(row)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outcome(group: RolloutGroup) -> tuple[str, int, int]:
    """`problem_key`, right answers, scored completions."""
    assert group.problem is not None
    right = [rollout.score.is_correct for rollout in group.rollouts if rollout.score.failure is None]
    return problem_key(group.problem), sum(right), len(right)


def recorded(store: str) -> Seen:
    """The pass rates of a store's training rollouts. Raises ConfigError where there is none."""
    from offline_grpo.rollouts.rows import plain_rows  # pyarrow
    from offline_grpo.rollouts.store import shards_of

    columns = ["phase", "messages", "answer", "fields", "turn_starts", "is_correct", "failure"]
    found: dict[str, tuple[float, float, int]] = {}
    for shard in shards_of(Path(store).expanduser(), key="data.pass_rate_from", phase="train"):
        for row in plain_rows(shard.table(columns)):
            if row["phase"] == "train" and row["messages"] is not None and row["failure"] is None:
                key = _key(row["messages"], row["answer"], row["turn_starts"] and json.loads(row["fields"]))
                right, total, _ = found.get(key, (0.0, 0.0, 0))
                found[key] = (right + row["is_correct"], total + 1, 0)
    return found
