"""MaxRL: the rarer a right answer, the more it counts, as in maximum likelihood (arXiv 2602.02710).

A_i = (r_i - mean(r)) / mean(r)          r is 1 for a correct completion, and 0 otherwise
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offline_grpo.errors import require
from offline_grpo.interfaces import Advantage, Task
from offline_grpo.types import RolloutGroup, TokenBatch


class MaxRL(Advantage):
    """See the module. A group without a correct completion gets 0: there is nothing whose likelihood could rise."""

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "train/advantage=maxrl looks at right and wrong alone, so the penalty would do nothing; use loss"
        require(config.train.loss.get("kl_placement") != "reward", "train.loss.kl_placement", "reward", fix)

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        return [_advantages(group) for group in groups]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(_advantages(group))


def _advantages(group: RolloutGroup) -> list[float]:
    are_correct = [float(rollout.score.is_correct) for rollout in group.rollouts]
    mean = sum(are_correct) / len(are_correct)
    return [(each - mean) / mean if mean else 0.0 for each in are_correct]
