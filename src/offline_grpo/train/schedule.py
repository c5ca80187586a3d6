"""The learning rate as a pure function of the update's index, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def lr_scale(update: int, *, num_updates: int, warmup_steps: int, schedule: str) -> float:
    """What the peak learning rate is multiplied by at update 0, 1, ...; above 0 at every one of the `num_updates` updates.

    The warm-up rises linearly, (update + 1) / warmup_steps, so that the first update moves. `linear` and `cosine` then fall
    towards 0, which they would reach at update `num_updates`.

    Example: warmup_steps=2, num_updates=4, linear: 0.5, 1, 1, 0.5.
    """
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (update - warmup_steps) / max(1, num_updates - warmup_steps))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
