"""GDPO: each part of the reward is normalised in its group before all are added up, so that none drowns another (arXiv
2601.05242).

    s_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-4)          A_i = (s_i - mean(s)) / (std(s) + 1e-4)

The first mean and std are of the group, the second of all rollouts of the iteration, whose mean is 0; sample std. As in
TRL 1.16, `multi_objective_aggregation="normalize_then_sum"`; verl's second step is over tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offline_grpo.errors import require
from offline_grpo.interfaces import Advantage, Task, TaskFacts
from offline_grpo.train.advantage import STD_EPS, like, normalised
from offline_grpo.types import RolloutGroup, Score, Split, TokenBatch

log = logging.getLogger(__name__)


def _penalties(config: Any) -> set[str]:
    """The parts that the source adds to every reward."""
    settings = {"overlong": "soft_overlong_tokens", "length": "penalize_length_if_solved"}
    return {part for part, name in settings.items() if config.rollouts.get(name)}


@dataclass(frozen=True)
class GDPO(Advantage):
    """See the module. A part that is equal in all of a group gives 0; one that a rollout lacks counts in no mean."""

    weights: Mapping[str, float] | None

    _known: set[str] = field(default_factory=set, init=False, repr=False)  # parts of this run so far

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        penalty = config.train.loss.get("kl_placement")
        fix = "train/advantage=gdpo adds up the parts of the reward, of which the penalty is none; use loss"
        require(penalty != "reward", "train.loss.kl_placement", penalty, fix)
        fix = "needs the parts of a reward, and groups of Atropos bring one number each; use group_std"
        require(not config.source.has_environments, "train/advantage", "gdpo", fix)
        if scored := [rollout for group in recorded for rollout in group.rollouts if rollout.score.is_scored]:
            self._check_parts({name for rollout in scored for name in rollout.score.parts})
        elif TaskFacts.of(task).scores_safely:  # always with the same parts
            tasks = getattr(task, "tasks", {"": task}).values()  # of a mixture
            scores = [each.score(each.problems(Split.TRAIN)[0], "") for each in tasks]
            self._check_parts({name for score in scores for name in score.parts} | _penalties(config))
        rewards = config.task.get("reward") or ()
        is_weighted = any(isinstance(item, Mapping) and item.get("weight", 1) != 1 for item in rewards)
        fix = "normalising removes the weights of task.reward; give them here, {FUNCTION: WEIGHT, ...}"
        require(self.weights is not None or not is_weighted, "train.advantage.weights", "null", fix)

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        names = {name for group in groups for rollout in group.rollouts for name in rollout.score.parts}
        weights, sums = self.weights or {}, np.zeros(batch.num_sequences)
        if not self._known and (len(names) < 2 or weights.keys() - names):
            log.warning("train/advantage=gdpo: the reward has no other parts than %s so far", ", ".join(sorted(names)))
        self._known.update(names)
        for own, parts in zip(like(sums, groups), map(_parts, groups), strict=True):
            for name, values in parts.items():
                own += weights.get(name, 1.0) * values
        std = sums.std(ddof=1) if len(sums) > 1 else 0.0
        return [own.tolist() for own in like(sums / (std + STD_EPS), groups)]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(values.any() for values in _parts(group).values())

    def needs_score(self, config: Any) -> bool:
        """Whether all that is rewarded is a function of the user's own, which may return several parts, or a number."""
        named = [config.task.get(name) or [] for name in ("reward", "group_reward")]
        return sum(len(each) if isinstance(each, list) else 1 for each in named) == 1 and not _penalties(config)

    def check_score(self, score: Score) -> None:
        """Raise ConfigError if the function of `needs_score` has returned a number."""
        if score.is_scored and not any("/" in name for name in score.parts):
            self._check_parts({*score.parts})

    def _check_parts(self, names: set[str]) -> None:
        found, unknown = ", ".join(sorted(names)) or "none", {*(self.weights or {})} - names
        fix = f"adds up several parts of the reward, which has {found}; use group_std"
        require(len(names) > 1, "train/advantage", "gdpo", fix)
        require(not unknown, "train.advantage.weights", self.weights, f"the reward's parts are {found}")


def _parts(group: RolloutGroup) -> dict[str, np.ndarray]:
    """Each part of a group's rewards, normalised in the group, [G]."""
    names = sorted({name for rollout in group.rollouts for name in rollout.score.parts})
    return {name: normalised([rollout.score.parts.get(name) for rollout in group.rollouts]) for name in names}
