"""RLOO: a completion is judged against the others of its prompt, without itself (arXiv 2402.14740).

A_i = r_i - mean of the other rewards of the group = (r_i - mean) * G / (G - 1)
"""

from __future__ import annotations

from collections.abc import Sequence

from offline_grpo.interfaces import Advantage
from offline_grpo.train.advantage import group_advantages, rewards_of
from offline_grpo.types import RolloutGroup, TokenBatch


class RLOO(Advantage):
    """Reward less the mean of the others. A group of one gets 0, as in TRL; verl gives it its reward."""

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        centred = group_advantages(rewards_of(groups), scale="none")
        return [[each * len(own) / max(len(own) - 1, 1) for each in own] for own in centred]
