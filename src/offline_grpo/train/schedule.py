"""The course of a run: its learning rate, a pure function of the update's index, so that a resumed run needs no state
of it; which checkpoint is the best one so far; and whether the run has reached what it was for.

This module imports no torch: whether a run is finished must be known before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offline_grpo.errors import ConfigError
from offline_grpo.settings import StopWhenConfig


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
        # Up to the peak, then along the curve.
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
        # A new peak, the same settings, or others while it still warms up: to the new ones' curve then.
        if restart:
            return replace(self, first=update, warms_up=warms_up)
        if self == replace(earlier, first=self.first, scale=self.scale, warms_up=self.warms_up):
            return earlier
        if earlier.warms_up and update - earlier.first < earlier.warmup_steps:
            return replace(self, first=earlier.first, scale=earlier.scale)

        # Others later on: the new curve begins where the learning rate is.
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


@dataclass
class Watch:
    """Follows one evaluation metric. The first of several equal values is the best."""

    metric: str  # its name; with a leading minus, lower is better
    best: float | None = None
    best_iteration: int | None = None
    last: float | None = None  # after training began
    num_since_best: int = 0  # evaluations

    @property
    def key(self) -> str:
        return self.metric.removeprefix("-")

    def is_better(self, value: float, than: float) -> bool:
        return value < than if self.metric.startswith("-") else value > than

    def see(self, metrics: Mapping[str, float], iteration: int) -> bool:
        """Count an evaluation; iteration -1 is the one before training. Returns whether it is the best so far."""
        value = metrics[self.key]
        if iteration >= 0:
            self.last = value
        is_best = self.best is None or self.is_better(value, self.best)
        if is_best:
            self.best, self.best_iteration, self.num_since_best = value, iteration, 0
        else:
            self.num_since_best += 1
        return is_best


class Milestones:
    """Sees every evaluation of a run; a checkpoint holds its state. `keep_best`: a metric as in `Watch`, or None."""

    def __init__(self, keep_best: str | None, stop_when: StopWhenConfig) -> None:
        self._stop_when = stop_when
        self._watches = {"stop_when": Watch(stop_when.metric)} if stop_when.is_active else {}
        if keep_best is not None:
            self._watches["keep_best"] = Watch(keep_best)

    def see(self, metrics: Mapping[str, float], iteration: int) -> bool:
        """Take note of an evaluation. Returns whether the state after `iteration` must be saved: as the best one, or
        the last one. The evaluation before training counts for early stopping alone: it belongs to no checkpoint.
        """
        names = [name for name in self._watches if iteration >= 0 or name != "keep_best"]
        is_best = {name: self._watches[name].see(metrics, iteration) for name in names}
        return is_best.get("keep_best", False) or self.stop_reason is not None

    @property
    def best_iteration(self) -> int | None:
        """Whose checkpoint is the best one so far; None if there is none yet, or nobody asked."""
        return self._watches["keep_best"].best_iteration if "keep_best" in self._watches else None

    @property
    def stop_reason(self) -> str | None:
        """Why `train.stop_when` ends the run; None if it does not."""
        watch, limit, patience = self._watches.get("stop_when"), self._stop_when.threshold, self._stop_when.patience
        if watch is None or watch.last is None:
            return None
        if limit is not None and not watch.is_better(limit, watch.last):
            return f"{watch.key}={watch.last:.4g} has reached train.stop_when.threshold={limit:g}"
        if patience is not None and watch.num_since_best >= patience:
            best = f"{watch.best:.4g} (after iteration {(watch.best_iteration or 0) + 1})"
            return f"no better {watch.key} than {best} in train.stop_when.patience={patience} evaluations"
        return None

    def stopped_early_metric(self, iteration: int, num_iterations: int) -> dict[str, float]:
        """The metric by which a record says that the run ended after this iteration, before its time; else none."""
        return {"stopped_early": 1.0} if self.stop_reason is not None and iteration + 1 < num_iterations else {}

    def state_dict(self) -> dict[str, Watch]:
        return {name: replace(watch) for name, watch in self._watches.items()}

    def load_state_dict(self, state: Mapping[str, Watch]) -> None:
        """Restore `state_dict()`. A metric that was not followed, or another one, has no best value yet."""
        for name, watch in self._watches.items():
            if name in state and state[name].metric == watch.metric:
                self._watches[name] = replace(state[name])

    def forget_best(self) -> None:
        """The best checkpoint is gone; the next one that is evaluated is the best."""
        self._watches["keep_best"] = Watch(self._watches["keep_best"].metric)


def early_stop_reason(saved: Mapping[str, Watch], stop_when: StopWhenConfig) -> str | None:
    """Why a run whose checkpoint has these milestones would not go on under these settings; None if it would."""
    milestones = Milestones(None, stop_when)
    milestones.load_state_dict(saved)
    return milestones.stop_reason
