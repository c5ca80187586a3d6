"""REINFORCE++ with the group's mean as baseline, normalised over the tokens of the iteration (arXiv 2501.03262).

    a_i = r_i - mean(r of the group)          A_i = (a_i - mean(a)) / sqrt(var(a) + 1e-8)

Mean and sample variance are over all trained tokens, so a long completion weighs more. The formula is that of verl
0.9.1, `compute_reinforce_plus_plus_baseline_outcome_advantage`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offline_grpo.interfaces import Advantage
from offline_grpo.train.advantage import group_advantages, like, rewards_of
from offline_grpo.types import RolloutGroup, TokenBatch

VARIANCE_EPS = 1e-8
"""verl's."""


class ReinforceBaseline(Advantage):
    """See the module. Groups with equal rewards count in mean and variance; they are silent all the same."""

    def __call__(self, groups: Sequence[RolloutGroup], batch: TokenBatch) -> list[list[float]]:
        centred = group_advantages(rewards_of(groups), scale="none")
        flat = np.concatenate(centred)  # [S]
        sequence_ids, mask = batch.sequence_ids.numpy(), batch.completion_mask.numpy()
        num_tokens = np.bincount(sequence_ids, weights=mask, minlength=len(flat))  # [S]
        total = max(num_tokens.sum(), 2.0)
        shifted = flat - (num_tokens @ flat) / total
        variance = num_tokens @ shifted**2 / (total - 1)
        return [own.tolist() for own in like(shifted / np.sqrt(variance + VARIANCE_EPS), groups)]
