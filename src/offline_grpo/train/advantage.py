"""Group-relative advantages: a completion is judged against the other completions of its prompt (GRPO, arXiv
2402.03300).

The components of the group `train/advantage`, and the arithmetic that all share. Nothing here imports torch before a
batch is there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import comb
from statistics import stdev
from typing import Any, ClassVar, Literal

import numpy as np

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Advantage, Task, TaskFacts
from offline_grpo.settings import check_url
from offline_grpo.types import EQUAL_REWARDS, RolloutGroup, Score, Split, TokenBatch

log = logging.getLogger(__name__)

Scale = Literal["group", "batch", "none"]
STD_EPS = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value. Bounds advantages of nearly constant groups."""


class OfGroupAlone(Advantage):
    """One that looks at a group alone, and may give it nothing although its rewards differ: then it is silent."""

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(map(np.any, self([group])[0]))  # type: ignore[call-arg]


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
        # Weighted by its number of trained tokens, each rollout stands for all of them: sums over R in place of T.
        flat = np.concatenate(group_advantages(rewards_of(groups), scale="none"))  # [R]
        owners, mask = np.array(batch.owners)[batch.sequence_ids.numpy()], batch.completion_mask.numpy()  # [T]
        num_tokens = np.bincount(owners, weights=mask, minlength=len(flat))  # [R]
        total = max(num_tokens.sum(), 2.0)
        shifted = flat - (num_tokens @ flat) / total
        variance = num_tokens @ shifted**2 / (total - 1)
        return [own.tolist() for own in like(shifted / np.sqrt(variance + 1e-8), groups)]


class MaxRL(OfGroupAlone):
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


@dataclass(frozen=True)
class PassK(OfGroupAlone):
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
        advantages = []
        for rewards in rewards_of(groups):
            size = len(rewards)
            k, found = min(self.k or size, size), [0.0] * size
            advantages.append(found)
            if k < 2 or max(rewards) - min(rewards) < EQUAL_REWARDS:
                continue
            # A completion adds something to those subsets of which it is the best. With the second best at place n of
            # the ascending order, the other k - 2 are chosen from the n before it: comb(n, k - 2) subsets.
            ascending = sorted(range(size), key=rewards.__getitem__)
            for place, best in enumerate(ascending):
                gaps = ((comb(n, k - 2), rewards[best] - rewards[ascending[n]]) for n in range(k - 2, place))
                total = sum(number * gap for number, gap in gaps)
                found[best] = total / comb(size - 1, k - 1) / (stdev(rewards) + 1e-6)
        return advantages


class PerToken(Advantage):
    """The numbers that a source gives for each token, as they are: `RolloutGroup.advantages`, which replace those of
    every other kind too; here a group without them is an error.
    """

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "this source gives no numbers of its own; use group_std, or a source that sets RolloutGroup.advantages"
        require(not config.source.samples, "train/advantage", "per_token", fix)
        self(recorded)

    def __call__(
        self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None
    ) -> list[Sequence[Sequence[float]]]:
        if any(group.advantages is None for group in groups):
            raise ConfigError("train/advantage=per_token: a group came without advantages of its own; use group_std")
        return [group.advantages for group in groups if group.advantages is not None]


class PerTurn(OfGroupAlone):
    """Credit for each turn of an episode (MT-GRPO, arXiv 2505.11821).

        R_ik = r_i - sum of the rewards of i's turns before k          A_ik = (R_ik - mean(R_k)) / (std(R_k) + 1e-4)

    What is still to come at turn k is compared with what came from that turn on in those rollouts of the group that
    have a k-th turn. Where no turn has a reward of its own, and all rollouts have as many turns, this is GRPO.
    """

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "this task has no turns; use an environment of many turns, or train/advantage=group_std"
        require(not config.source.samples or TaskFacts.of(task).plays, "train/advantage", "per_turn", fix)
        self([group for group in map(RolloutGroup.scored, recorded) if group is not None])

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None) -> list[list[list[float]]]:
        advantages = []  # [groups][G][N]
        for rollouts in (group.rollouts for group in groups):
            if not all(rollout.turns for rollout in rollouts):
                fault = "these rollouts do not tell their turns apart; use group_std"
                raise ConfigError(f"train/advantage=per_turn: {fault}")
            # What is still to come at each turn: the reward, less what the turns before have brought.
            found = [[0.0] * len(rollout.token_ids) for rollout in rollouts]
            paid = [accumulate((turn.reward for turn in rollout.turns), initial=0.0) for rollout in rollouts]
            to_come = [[r.score.reward - each for each in own][:-1] for r, own in zip(rollouts, paid, strict=True)]
            # Turn by turn, among the rollouts that got so far; the tokens of a turn share its number.
            for k, values in enumerate(zip_longest(*to_come)):
                for rollout, own, advantage in zip(rollouts, found, normalised(values).tolist(), strict=True):
                    for turn in rollout.turns[k : k + 1]:
                        own[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
            advantages.append(found)
        return advantages


@dataclass(frozen=True)
class GDPO(Advantage):
    """Each part of the reward is normalised in its group before all are added up, so that none drowns another (GDPO,
    arXiv 2601.05242).

        s_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-4)          A_i = (s_i - mean(s)) / (std(s) + 1e-4)

    The first mean and std are of the group, the second of all rollouts of the iteration, whose mean is 0; sample std.
    As in TRL 1.16, `multi_objective_aggregation="normalize_then_sum"`; verl's second step is over tokens. A part that
    is equal in all of a group gives 0; one that a rollout lacks counts in no mean.
    """

    weights: Mapping[str, float] | None

    _known: set[str] = field(default_factory=set, init=False, repr=False)  # parts of this run so far

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        # The reward must reach this advantage in parts.
        penalty = config.train.loss.get("kl_placement")
        fix = "train/advantage=gdpo adds up the parts of the reward, of which the penalty is none; use loss"
        require(penalty != "reward", "train.loss.kl_placement", penalty, fix)
        fix = "needs the parts of a reward, and groups of Atropos bring one number each; use group_std"
        require(not config.source.has_environments, "train/advantage", "gdpo", fix)

        # Several parts, with the names that weights have: of recorded rollouts, or of a task that can be asked now.
        if scored := [rollout for group in recorded for rollout in group.rollouts if rollout.score.is_scored]:
            self._check_parts({name for rollout in scored for name in rollout.score.parts})
        elif TaskFacts.of(task).scores_safely:  # always with the same parts
            tasks = getattr(task, "tasks", {"": task}).values()  # of a mixture
            scores = [each.score(each.problems(Split.TRAIN)[0], "") for each in tasks]
            self._check_parts({name for score in scores for name in score.parts} | penalty_parts(config))
        rewards = config.task.get("reward") or ()
        is_weighted = any(isinstance(item, Mapping) and item.get("weight", 1) != 1 for item in rewards)
        fix = "normalising removes the weights of task.reward; give them here, {FUNCTION: WEIGHT, ...}"
        require(self.weights is not None or not is_weighted, "train.advantage.weights", "null", fix)

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        # Parts are named once the first rewards are there; this is the last moment to say that there are none.
        names = {name for group in groups for rollout in group.rollouts for name in rollout.score.parts}
        weights, sums = self.weights or {}, np.zeros(batch.num_rollouts)
        if not self._known and (len(names) < 2 or weights.keys() - names):
            log.warning("train/advantage=gdpo: the reward has no other parts than %s so far", ", ".join(sorted(names)))
        self._known.update(names)

        # Normalised in the group, weighted and added up; then all of the iteration brought to one scale.
        for own, parts in zip(like(sums, groups), map(normalised_parts, groups), strict=True):
            for name, values in parts.items():
                own += weights.get(name, 1.0) * values
        std = sums.std(ddof=1) if len(sums) > 1 else 0.0
        return [own.tolist() for own in like(sums / (std + STD_EPS), groups)]

    def is_silent(self, group: RolloutGroup) -> bool:
        return not any(values.any() for values in normalised_parts(group).values())

    def needs_score(self, config: Any) -> bool:
        """Whether all that is rewarded is a function of the user's own, which may return several parts, or a number."""
        named = [config.task.get(name) or [] for name in ("reward", "group_reward")]
        return sum(len(each) if isinstance(each, list) else 1 for each in named) == 1 and not penalty_parts(config)

    def check_score(self, score: Score) -> None:
        """Raise ConfigError if the function of `needs_score` has returned a number."""
        if score.is_scored and not any("/" in name for name in score.parts):
            self._check_parts({*score.parts})

    def _check_parts(self, names: set[str]) -> None:
        found, unknown = ", ".join(sorted(names)) or "none", {*(self.weights or {})} - names
        fix = f"adds up several parts of the reward, which has {found}; use group_std"
        require(len(names) > 1, "train/advantage", "gdpo", fix)
        require(not unknown, "train.advantage.weights", self.weights, f"the reward's parts are {found}")


@dataclass(frozen=True, kw_only=True)
class Distill(Advantage):
    """On-policy distillation: the policy samples, and a teacher says of each token how likely it would have been.

    `weight * (log teacher - log policy)` of each sampled token, plus the advantage of `base`: per-token reverse KL
    (On-Policy Distillation, Thinking Machines Lab 2025, thinkingmachines.ai/blog/on-policy-distillation, and
    `incorporate_kl_penalty` in their tinker-cookbook, without its discount). As there, log policy is the sampler's.
    """

    teacher: str | None
    weight: float
    base: Advantage | None

    def __post_init__(self) -> None:
        require(self.weight > 0, "train.advantage.weight", self.weight, "must be above 0")
        if is_url(self.teacher):
            check_url("train.advantage.teacher", self.teacher)

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        return () if self.base is None else self.base.needs

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        self._check_groups([] if self.teacher is not None else recorded)
        if self.base is not None:
            self.base.check(config, task, recorded)

    def is_silent(self, group: RolloutGroup) -> bool:
        """A teacher has something to say about equal rewards too."""
        return False

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[list[float]]]:
        """Raises ConfigError where rollouts lack a teacher's logprobs, or come with advantages of their own."""
        import torch

        if batch.teacher_logprobs is None:
            self._check_groups(groups)
        assert batch.teacher_logprobs is not None
        fix = "these rollouts come with advantages of their own, in which no teacher is; use another train/advantage"
        has_none = all(group.advantages is None for group in groups)
        require(has_none, "train.advantage.teacher", self.teacher or "null", fix)

        # Of each rollout a row with a number for each token, to which its one number of the base is added.
        rows = iter((self.weight * (batch.teacher_logprobs - batch.rollout_logprobs)).split(batch.rollout_lengths))
        base = [[0.0] * len(group.rollouts) for group in groups] if self.base is None else self.base(groups, batch)
        return [[(next(rows) + torch.tensor(own)).tolist() for own in of_group] for of_group in base]

    def _check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        has = [rollout.teacher_logprobs is not None for group in groups for rollout in group.rollouts]
        fix = f"{has.count(False)} of {len(has)} rollouts come without a teacher's logprobs; name a teacher"
        require(all(has), "train.advantage.teacher", self.teacher or "null", fix)


def rewards_of(groups: Sequence[RolloutGroup]) -> list[list[float]]:
    """The rewards of each group."""
    return [[rollout.score.reward for rollout in group.rollouts] for group in groups]


def like(flat: np.ndarray, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
    """Views of the numbers of all rollouts [R], one for each group."""
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
    # All groups in one row, [S] as what follows: loops over groups take longer.
    sizes = np.array([len(group) for group in rewards])
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


def normalised_parts(group: RolloutGroup) -> dict[str, np.ndarray]:
    """Each part of a group's rewards, normalised in the group, [G]."""
    names = sorted({name for rollout in group.rollouts for name in rollout.score.parts})
    return {name: normalised([rollout.score.parts.get(name) for rollout in group.rollouts]) for name in names}


def penalty_parts(config: Any) -> set[str]:
    """The parts that the source adds to every reward."""
    settings = {"overlong": "soft_overlong_tokens", "length": "penalize_length_if_solved"}
    return {part for part, name in settings.items() if config.rollouts.get(name)}


def is_url(teacher: str | None) -> bool:
    """Whether a teacher is behind a server."""
    return teacher is not None and teacher.startswith(("http://", "https://"))
