"""Group-relative advantages: a completion is judged against the other completions of its prompt (GRPO, arXiv
2402.03300).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offline_grpo.types import SCALE_REWARDS

CONSTANT_STD = 1e-6
"""A group whose rewards spread less than this holds equal rewards: what is left of `reward - mean` is rounding, not
signal.
"""

STD_EPS = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value, which bounds the advantages of nearly constant
groups.
"""


def group_advantages(rewards: Sequence[Sequence[float]], *, scale: str) -> list[list[float]]:
    """The advantage of every completion, in the shape of `rewards`: one list of G rewards per group, groups may differ
    in size.

    `(reward - mean of its group) / (std + 1e-4)`, where the sample std (G - 1 in the denominator) is taken over
        "group": the completion's own group (GRPO);
        "batch": all rewards of all groups, so that easy and hard prompts keep their relative weight (arXiv 2508.08221);
        "none":  nothing, the difference is returned as it is (Dr. GRPO, arXiv 2503.20783).
    A group of equal rewards, or of one, gives exactly 0 under every scale. Computed in float64.

    Example: [[1, 0], [5, 5]] under "none" gives [[0.5, -0.5], [0, 0]].
    """
    if scale not in SCALE_REWARDS:
        raise ValueError(f"scale is {scale!r}; choose one of {', '.join(SCALE_REWARDS)}")
    if not rewards:
        return []
    sizes = np.array([len(group) for group in rewards])
    flat = np.array(
        [reward for group in rewards for reward in group], np.float64
    )  # [S], as what follows: loops over groups take longer
    starts = np.cumsum(sizes) - sizes
    centred = flat - np.repeat(np.add.reduceat(flat, starts) / sizes, sizes)
    group_std = np.repeat(np.sqrt(np.add.reduceat(centred**2, starts) / np.maximum(sizes - 1, 1)), sizes)
    batch_std = flat.std(ddof=1) if len(flat) > 1 else 0.0
    divisor = {"group": group_std + STD_EPS, "batch": batch_std + STD_EPS, "none": 1.0}[scale]
    advantages = np.where(group_std < CONSTANT_STD, 0.0, centred / divisor)
    return [own.tolist() for own in np.split(advantages, starts[1:])]


def zero_signal_groups(advantages: Sequence[Sequence[float]]) -> list[bool]:
    """For each group, whether all its advantages are 0: it moves the policy nowhere and its forward passes can be
    saved.
    """
    return [all(advantage == 0.0 for advantage in group) for group in advantages]
