"""Group-relative advantages: a completion is judged against the other completions of its prompt (GRPO, arXiv
2402.03300).

The components of the group `train/advantage`, and the arithmetic that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from offline_grpo.interfaces import Advantage
from offline_grpo.types import EQUAL_REWARDS, RolloutGroup, TokenBatch

Scale = Literal["group", "batch", "none"]
STD_EPS = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value. Bounds advantages of nearly constant groups."""


class GroupStd(Advantage):
    """`(reward - mean of its group) / (std of its group + 1e-4)`: GRPO."""

    scale: ClassVar[Scale] = "group"

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        return group_advantages(rewards_of(groups), scale=self.scale)


class GroupMean(GroupStd):
    """`reward - mean of its group`: Dr. GRPO (arXiv 2503.20783)."""

    scale = "none"


class BatchStd(GroupStd):
    """`(reward - mean of its group) / (std of all rewards + 1e-4)`: easy and hard prompts keep their relative weight
    (arXiv 2508.08221).
    """

    scale = "batch"


def rewards_of(groups: Sequence[RolloutGroup]) -> list[list[float]]:
    """The rewards of each group."""
    return [[rollout.score.reward for rollout in group.rollouts] for group in groups]


def like(flat: np.ndarray, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
    """Views of the numbers of all rollouts [S], one for each group."""
    return np.split(flat, np.cumsum([len(group.rollouts) for group in groups])[:-1])


def normalised(values: Sequence[float | None]) -> np.ndarray:
    """What of a group has a value, less its mean and divided by its std + 1e-4; 0 for the rest, [G]."""
    found = np.zeros(len(values))
    has = [value is not None for value in values]
    if any(has):
        found[has] = group_advantages([[value for value in values if value is not None]], scale="group")[0]
    return found


def group_advantages(rewards: Sequence[Sequence[float]], *, scale: Scale) -> list[list[float]]:
    """Each group's rewards less their mean, divided by the sample std (G - 1 in the denominator) of the group, of the
    batch, or by nothing. Groups may differ in size.

    A group of equal rewards, or of one, gives exactly 0 under every scale. Computed in float64.

    Example: [[1, 0], [5, 5]] under "none" gives [[0.5, -0.5], [0, 0]].
    """
    if not rewards:
        return []
    sizes = np.array([len(group) for group in rewards])
    # [S], as what follows: loops over groups take longer
    flat = np.array([reward for group in rewards for reward in group], np.float64)
    starts = np.cumsum(sizes) - sizes
    first = np.repeat(flat[starts], sizes)
    # Measured from the first of their group where the mean of equal ones may be rounded by more than EQUAL_REWARDS.
    values = np.where(np.abs(first) > 1e6, flat - first, flat)
    centred = values - np.repeat(np.add.reduceat(values, starts) / sizes, sizes)
    group_std = np.repeat(np.sqrt(np.add.reduceat(centred**2, starts) / np.maximum(sizes - 1, 1)), sizes)
    batch_std = flat.std(ddof=1) if len(flat) > 1 else 0.0
    divisor = {"group": group_std + STD_EPS, "batch": batch_std + STD_EPS, "none": 1.0}[scale]
    advantages = np.where(group_std < EQUAL_REWARDS, 0.0, centred / divisor)
    return [own.tolist() for own in np.split(advantages, starts[1:])]


def zero_signal_groups(advantages: Sequence[Sequence[float]]) -> list[bool]:
    """For each group, whether all its advantages are 0, so that it moves the policy nowhere."""
    return [all(advantage == 0.0 for advantage in group) for group in advantages]
