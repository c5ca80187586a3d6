"""Rollouts sampled from the policy as it is now."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from offline_grpo.generation.sample import sample_in_order
from offline_grpo.interfaces import RolloutClient, Task, TextCodec
from offline_grpo.seeding import derive_seed
from offline_grpo.types import Metrics, Problem, RolloutGroup, SamplingParams


@lru_cache(maxsize=2)
def permutation(length: int, seed: int) -> tuple[int, ...]:
    """0 .. length-1 in an order that the seed alone decides."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return tuple(order)


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """A `RolloutSource` that samples `group_size` completions of `problems_per_iteration` problems in `next`, and scores them.

    Args:
        shuffle: visit the problems in a new order on each pass over them.
        rank, world_size: process `rank` of `world_size` samples every `world_size`-th problem.
    """

    problems_per_iteration: int
    group_size: int
    shuffle: bool
    seed: int

    client: RolloutClient
    task: Task
    problems: Sequence[Problem]
    codec: TextCodec
    sampling: SamplingParams
    rank: int
    world_size: int

    needs_problems: ClassVar[bool] = True

    @staticmethod
    def check(config: Any) -> None:
        """See `RolloutSource.check`. It works in every run."""

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """See `RolloutSource.start`. Nothing runs ahead."""

    def next(self, iteration: int) -> list[RolloutGroup]:
        """See `RolloutSource.next`. A function of the seed, the iteration and the weights alone: a resumed run draws the same."""
        first = iteration * self.problems_per_iteration
        positions = range(first, first + self.problems_per_iteration)[self.rank :: self.world_size]
        draws = [(self._problem_at(position), derive_seed(self.seed, "rollout", position)) for position in positions]
        return sample_in_order(self.client, self.task, self.codec, draws, self.sampling, group_size=self.group_size)

    def weights_changed(self, version: int) -> None:
        """See `RolloutSource.weights_changed`. The client knows."""

    def metrics(self) -> Metrics:
        """See `RolloutSource.metrics`. The rollouts say it all."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """See `RolloutSource.state_dict`. The iteration says it all."""
        return {}

    def close(self) -> None:
        """See `RolloutSource.close`."""

    def _problem_at(self, position: int) -> Problem:
        """The problem at `position` of the endless sequence of passes."""
        epoch, offset = divmod(position, len(self.problems))
        order = permutation(len(self.problems), derive_seed(self.seed, "order", epoch)) if self.shuffle else range(len(self.problems))
        return self.problems[order[offset]]
