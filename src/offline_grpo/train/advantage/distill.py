"""On-policy distillation: the policy samples, and a teacher says of each token how likely it would have been."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offline_grpo.errors import require
from offline_grpo.interfaces import Advantage, Task
from offline_grpo.settings import check_url
from offline_grpo.types import RolloutGroup, TokenBatch


def is_url(teacher: str | None) -> bool:
    """Whether a teacher is behind a server."""
    return teacher is not None and teacher.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class Distill(Advantage):
    """`weight * (log teacher - log policy)` of each sampled token, plus the advantage of `base`: per-token reverse KL
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
        if batch.teacher_logprobs is None:
            self._check_groups(groups)
        fix = "these rollouts come with advantages of their own, in which no teacher is; use another train/advantage"
        require(
            all(group.advantages is None for group in groups), "train.advantage.teacher", self.teacher or "null", fix
        )
        assert batch.teacher_logprobs is not None
        rows = iter((self.weight * (batch.teacher_logprobs - batch.rollout_logprobs)).split(batch.sequence_lengths))
        base = [[0.0] * len(group.rollouts) for group in groups] if self.base is None else self.base(groups, batch)
        return [[(next(rows) + torch.tensor(own)).tolist() for own in of_group] for of_group in base]

    def _check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        has = [rollout.teacher_logprobs is not None for group in groups for rollout in group.rollouts]
        fix = f"{has.count(False)} of {len(has)} rollouts come without a teacher's logprobs; name a teacher"
        require(all(has), "train.advantage.teacher", self.teacher or "null", fix)
