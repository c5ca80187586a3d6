"""The learning rate as a pure function of the update's index, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offline_grpo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """What the peak learning rate is multiplied by at an update: `schedule(update)`.

    The warm-up rises linearly, (update + 1) / warmup_steps, so that the first update moves. `linear` and `cosine` then
    fall towards 0, which they would reach at update `num_updates`.

    Example: kind="linear", num_updates=4, warmup_steps=2: 0.5, 1, 1, 0.5.
    """

    kind: str  # constant | linear | cosine
    num_updates: int  # that the whole run plans, counted from its beginning
    warmup_steps: int
    first: int = 0  # the update at which it begins; above 0 if the run was given another one when it was resumed
    scale: float = 1.0  # of the whole curve: where the earlier schedule was at `first`
    warms_up: bool = True  # whether the warm-up comes first; not where it continues an earlier schedule

    def __call__(self, update: int) -> float:
        """The factor at `update`, 0 being the run's first; above 0 at every update up to `num_updates`."""
        done, warmup_steps = update - self.first, self.warmup_steps if self.warms_up else 0
        if done < warmup_steps:
            return self.scale * (done + 1) / warmup_steps
        if self.kind == "constant":
            return self.scale
        progress = min(1.0, (done - warmup_steps) / max(1, self.num_updates - self.first - warmup_steps))
        return self.scale * (1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))

    def continuing(self, earlier: LrSchedule, update: int, *, restart: bool, warms_up: bool) -> LrSchedule:
        """The schedule of a run that continues at `update`, where it had `earlier` and its settings now ask for this
        one. With the same settings it is `earlier` itself. With others the learning rate continues from where it is:
        the curve of the new kind, scaled to begin there, over the updates that are left.

        With `restart` it begins anew at the peak, because the user has set one, and warms up to it if `warms_up`.
        Raises ConfigError where the earlier schedule has come to its end: there is nothing left to fall from.
        """
        if restart:
            return replace(self, first=update, warms_up=warms_up)
        if self == replace(earlier, first=self.first, scale=self.scale, warms_up=self.warms_up):
            return earlier
        if earlier.warms_up and update - earlier.first < earlier.warmup_steps:
            return replace(self, first=earlier.first, scale=earlier.scale)
        scale = earlier(update)
        if scale == 0.0:
            fault = f"the {earlier.kind} schedule of this run has come to its end, where the learning rate is 0"
            fix = "set a new one, such as train.lr=1e-4 (it falls to 0 again, unless train.schedule=constant)"
            raise ConfigError(f"train.iterations: {fault}; {fix}")
        return replace(self, first=update, scale=scale, warms_up=False)


@dataclass
class UpdateCounters:
    """Updates of the policy, counted over the whole run and saved with it."""

    num_updates: int = 0  # attempted, refused ones included: the position in the learning-rate schedule
    num_refused: int = 0
    num_refused_in_a_row: int = 0

    @property
    def version(self) -> int:
        """Updates that the weights carry."""
        return self.num_updates - self.num_refused
