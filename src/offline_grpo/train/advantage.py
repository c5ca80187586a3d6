"""Group-relative advantages: a completion is judged against the other completions of its prompt (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offline_grpo.types import SCALE_REWARDS

CONSTANT_STD = 1e-6
"""A group whose rewards spread less than this holds equal rewards: what is left of `reward - mean` is rounding, not signal."""

STD_EPS = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value, which bounds the advantages of nearly constant groups."""


def group_advantages(rewards: Sequence[Sequence[float]], *, scale: str) -> list[list[float]]:
    """The advantage of every completion, in the shape of `rewards`: one list of G rewards per group, groups may differ in size.

    `(reward - mean of its group) / (std + 1e-4)`, where the sample std (G - 1 in the denominator) is taken over
        "group": the completion's own group (GRPO);
        "batch": all rewards of all groups, so that easy and hard prompts keep their relative weight (arXiv 2508.08221);
        "none":  nothing, the difference is returned as it is (Dr. GRPO, arXiv 2503.20783).
    A group of equal rewards, or of one, gives exactly 0 under every scale. Computed in float64.

    Example: [[1, 0], [5, 5]] under "none" gives [[0.5, -0.5], [0, 0]].
    """
    if scale not in SCALE_REWARDS:
        raise ValueError(f"scale is {scale!r}; choose one of {', '.join(SCALE_REWARDS)}")
    groups = [torch.tensor(group, dtype=torch.float64) for group in rewards]
    batch_std = _std(torch.cat(groups)) if groups else 0.0
    return [_centred(group, scale, batch_std).tolist() for group in groups]


def zero_signal_groups(advantages: Sequence[Sequence[float]]) -> list[bool]:
    """For each group, whether all its advantages are 0: it moves the policy nowhere and its forward passes can be saved."""
    return [all(advantage == 0.0 for advantage in group) for group in advantages]


def _centred(group: Tensor, scale: str, batch_std: float) -> Tensor:
    group_std = _std(group)
    if group_std < CONSTANT_STD:
        return torch.zeros_like(group)
    centred = group - group.mean()  # [G]
    if scale == "none":
        return centred
    return centred / ((group_std if scale == "group" else batch_std) + STD_EPS)


def _std(values: Tensor) -> float:
    return values.std().item() if len(values) > 1 else 0.0
