"""Pass@k: a completion is worth what it adds to the best of k (arXiv 2503.19595).

    A_i = mean over the subsets S of k completions that contain i of (max(S) - max(S without i)), / (std + 1e-6)

With k = G there is one subset, and only the best completion gets something: its distance to the second best, as in verl
0.9.1, `compute_grpo_passk_outcome_advantage`. The mean over the subsets of a smaller k is exact, from sorted rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import stdev
from typing import Any

from offline_grpo.errors import require
from offline_grpo.interfaces import Advantage, Task
from offline_grpo.train.advantage import rewards_of
from offline_grpo.types import EQUAL_REWARDS, RolloutGroup, TokenBatch

STD_EPS = 1e-6
"""verl's."""


@dataclass(frozen=True)
class PassK(Advantage):
    """See the module. A group with fewer rollouts than `k`, of which others failed, takes all it has."""

    k: int | None

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        size = config.rollouts.get("group_size")
        most = f"data.rollouts_per_problem={size}, the completions of a group"
        if recorded:
            size = max(len(group.rollouts) for group in recorded)
            most = f"{size}, the completions of the largest recorded group"
        fix = f"must be from 2 to {most}, or null for all of them"
        require(self.k is None or 2 <= self.k <= (size or self.k), "train.advantage.k", self.k, fix)

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        return [self._advantages(rewards) for rewards in rewards_of(groups)]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(self._advantages(*rewards_of([group])))

    def _advantages(self, rewards: list[float]) -> list[float]:
        size = len(rewards)
        k = min(self.k or size, size)
        if k < 2 or max(rewards) - min(rewards) < EQUAL_REWARDS:
            return [0.0] * size
        ascending = sorted(range(size), key=rewards.__getitem__)
        found = [0.0] * size
        for place, best in enumerate(ascending):  # the best of a subset whose second best stands at an earlier place
            gaps = ((comb(n, k - 2), rewards[best] - rewards[ascending[n]]) for n in range(k - 2, place))
            found[best] = sum(number * gap for number, gap in gaps) / comb(size - 1, k - 1) / (stdev(rewards) + STD_EPS)
        return found
