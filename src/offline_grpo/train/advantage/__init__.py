"""Group-relative advantages: a completion is judged against the other completions of its prompt (GRPO, arXiv
2402.03300).

The components of the group `train/advantage` that need a few lines, and the arithmetic that all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import comb
from statistics import stdev
from typing import Any, ClassVar, Literal

import numpy as np

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Advantage, Task
from offline_grpo.types import EQUAL_REWARDS, RolloutGroup, TokenBatch

Scale = Literal["group", "batch", "none"]
STD_EPS = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value. Bounds advantages of nearly constant groups."""


WITHOUT = ("offline_grpo.rollouts.on_policy.OnPolicy", "offline_grpo.rollouts.asynchronous.Asynchronous")
"""Sources that give no advantages; a subclass may."""


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


class RLOO(Advantage):
    """A completion is judged against the others of its prompt, without itself (arXiv 2402.14740). A group of one gets
    0, as in TRL; verl gives it its reward.

        A_i = r_i - mean of the other rewards of the group = (r_i - mean) * G / (G - 1)
    """

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        centred = group_advantages(rewards_of(groups), scale="none")
        return [[each * len(own) / max(len(own) - 1, 1) for each in own] for own in centred]


class ReinforceBaseline(Advantage):
    """REINFORCE++ with the group's mean as baseline, normalised over the tokens of the iteration (arXiv 2501.03262).

        a_i = r_i - mean(r of the group)          A_i = (a_i - mean(a)) / sqrt(var(a) + 1e-8)

    Mean and sample variance are over all trained tokens, so a long completion weighs more; those of groups with equal
    rewards count too, which are silent all the same. As in verl 0.9.1, with its 1e-8,
    `compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        flat = np.concatenate(group_advantages(rewards_of(groups), scale="none"))  # [S]
        sequence_ids, mask = batch.sequence_ids.numpy(), batch.completion_mask.numpy()
        num_tokens = np.bincount(sequence_ids, weights=mask, minlength=len(flat))  # [S]
        total = max(num_tokens.sum(), 2.0)
        shifted = flat - (num_tokens @ flat) / total
        variance = num_tokens @ shifted**2 / (total - 1)
        return [own.tolist() for own in like(shifted / np.sqrt(variance + 1e-8), groups)]


class MaxRL(Advantage):
    """The rarer a right answer, the more it counts, as in maximum likelihood (arXiv 2602.02710).

        A_i = (r_i - mean(r)) / mean(r)          r is 1 for a correct completion, and 0 otherwise

    A group without a correct completion gets 0: there is nothing whose likelihood could rise.
    """

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "train/advantage=maxrl looks at right and wrong alone, so the penalty would do nothing; use loss"
        require(config.train.loss.get("kl_placement") != "reward", "train.loss.kl_placement", "reward", fix)

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None) -> list[list[float]]:
        found = []
        for group in groups:
            are_correct = [float(rollout.score.is_correct) for rollout in group.rollouts]
            mean = sum(are_correct) / len(are_correct)
            found.append([(each - mean) / mean if mean else 0.0 for each in are_correct])
        return found

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(*self([group]))


@dataclass(frozen=True)
class PassK(Advantage):
    """A completion is worth what it adds to the best of k (arXiv 2503.19595).

        A_i = mean over the subsets S of k completions that contain i of (max(S) - max(S without i)), / (std + 1e-6)

    With k = G there is one subset, and only the best completion gets something: its distance to the second best, as in
    verl 0.9.1, `compute_grpo_passk_outcome_advantage`, with its 1e-6. The mean over the subsets of a smaller k is
    exact, from sorted rewards. A group with fewer rollouts than `k`, of which others failed, takes all it has.
    """

    k: int | None

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        size = config.rollouts.get("group_size")
        most = f"data.rollouts_per_problem={size}, the completions of a group"
        if recorded:
            size = max(len(group.rollouts) for group in recorded)
            most = f"{size}, the completions of the largest recorded group"
        fix = f"must be from 2 to {most}, or null for all of them"
        require(self.k is None or 2 <= self.k <= (size or self.k), "train.advantage.k", self.k, fix)

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None) -> list[list[float]]:
        return [self._advantages(rewards) for rewards in rewards_of(groups)]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(*self([group]))

    def _advantages(self, rewards: list[float]) -> list[float]:
        size = len(rewards)
        k = min(self.k or size, size)
        if k < 2 or max(rewards) - min(rewards) < EQUAL_REWARDS:
            return [0.0] * size
        ascending = sorted(range(size), key=rewards.__getitem__)
        found = [0.0] * size
        for place, best in enumerate(ascending):  # the best of a subset whose second best stands at an earlier place
            gaps = ((comb(n, k - 2), rewards[best] - rewards[ascending[n]]) for n in range(k - 2, place))
            found[best] = sum(number * gap for number, gap in gaps) / comb(size - 1, k - 1) / (stdev(rewards) + 1e-6)
        return found


class PerToken(Advantage):
    """The numbers that a source gives for each token, as they are: `RolloutGroup.advantages`, which replace those of
    every other kind too; here a group without them is an error.
    """

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "this source gives no numbers of its own; use group_std, or a source that sets RolloutGroup.advantages"
        require(config.rollouts.get("_target_") not in WITHOUT, "train/advantage", "per_token", fix)
        self(recorded)

    def __call__(
        self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None
    ) -> list[Sequence[Sequence[float]]]:
        if any(group.advantages is None for group in groups):
            raise ConfigError("train/advantage=per_token: a group came without advantages of its own; use group_std")
        return [group.advantages for group in groups if group.advantages is not None]


class PerTurn(Advantage):
    """Credit for each turn of an episode (MT-GRPO, arXiv 2505.11821).

        R_ik = r_i - sum of the rewards of i's turns before k          A_ik = (R_ik - mean(R_k)) / (std(R_k) + 1e-4)

    What is still to come at turn k is compared with what came from that turn on in those rollouts of the group that
    have a k-th turn. Where no turn has a reward of its own, and all rollouts have as many turns, this is GRPO.
    """

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        is_sampled = "group_size" in config.rollouts and "url" not in config.rollouts
        fix = "this task has no turns; use an environment of many turns, or train/advantage=group_std"
        require(not is_sampled or hasattr(task, "play"), "train/advantage", "per_turn", fix)
        self([group for group in map(RolloutGroup.scored, recorded) if group is not None])

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None) -> list[list[list[float]]]:
        return [self._advantages(group) for group in groups]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(map(any, self._advantages(group)))

    def _advantages(self, group: RolloutGroup) -> list[list[float]]:
        """[G][N]"""
        if not all(rollout.turns for rollout in group.rollouts):
            raise ConfigError("train/advantage=per_turn: these rollouts do not tell their turns apart; use group_std")
        found = [[0.0] * len(rollout.token_ids) for rollout in group.rollouts]
        paid = [accumulate((turn.reward for turn in rollout.turns), initial=0.0) for rollout in group.rollouts]
        to_come = [[r.score.reward - each for each in own][:-1] for r, own in zip(group.rollouts, paid, strict=True)]
        for k, values in enumerate(zip_longest(*to_come)):
            for rollout, own, advantage in zip(group.rollouts, found, normalised(values).tolist(), strict=True):
                for turn in rollout.turns[k : k + 1]:
                    own[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
        return found


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
