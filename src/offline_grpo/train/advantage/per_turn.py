"""Credit for each turn of an episode (MT-GRPO, arXiv 2505.11821).

    R_ik = r_i - sum of the rewards of i's turns before k          A_ik = (R_ik - mean(R_k)) / (std(R_k) + 1e-4)

What is still to come at turn k is compared with what came from that turn on in those rollouts of the group that have a
k-th turn. Where no turn has a reward of its own, and all rollouts have as many turns, this is GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Advantage, Task, TaskFacts
from offline_grpo.train.advantage import normalised
from offline_grpo.types import RolloutGroup, TokenBatch


class PerTurn(Advantage):
    """See the module."""

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "this task has no turns; use an environment of many turns, or train/advantage=group_std"
        require(not config.source.samples or TaskFacts.of(task).plays, "train/advantage", "per_turn", fix)
        self([group for group in map(RolloutGroup.scored, recorded) if group is not None])

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None) -> list[list[list[float]]]:
        return [_advantages(group) for group in groups]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(map(any, _advantages(group)))


def _advantages(group: RolloutGroup) -> list[list[float]]:
    """[G][N]"""
    if not all(rollout.turns for rollout in group.rollouts):
        raise ConfigError("train/advantage=per_turn: these rollouts do not tell their turns apart; use group_std")
    found = [[0.0] * len(rollout.token_ids) for rollout in group.rollouts]
    to_come = [
        [rollout.score.reward - paid for paid in accumulate((turn.reward for turn in rollout.turns), initial=0.0)][:-1]
        for rollout in group.rollouts
    ]
    for k, values in enumerate(zip_longest(*to_come)):
        for rollout, own, advantage in zip(group.rollouts, found, normalised(values).tolist(), strict=True):
            for turn in rollout.turns[k : k + 1]:
                own[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
    return found
