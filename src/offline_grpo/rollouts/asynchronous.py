"""Rollouts that are sampled while the trainer trains, from weights at most `max_staleness` updates older than it has.

Iteration i trains on the problems that `OnPolicy` would give it, so a checkpoint needs nothing of what was under way.
An iteration is sampled in a thread of its own, which the main thread alone begins and waits for. It begins as soon as
its rollouts cannot become too old: the trainer makes at most `updates_per_iteration` updates in each iteration before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from statistics import fmean
from typing import Any, ClassVar, Literal

from offline_grpo import progress
from offline_grpo.engine.streaming import in_background
from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import RunListener
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.settings import RunConfig
from offline_grpo.types import Metrics, RolloutGroup

TICK_S = 0.2
END_S = 5.0  # how long threads are waited for whose requests have been cancelled; code that scores may keep one longer


class Round(RunListener):
    """An iteration that is being sampled, or has been. Several that are sampled at once share these `seconds`."""

    groups: Future[list[RolloutGroup]]
    is_over: bool = False
    seconds: float = 0.0
    said: tuple[int, int, str] = (0, 0, "completions")

    def progress(self, done: int, total: int, unit: str) -> None:
        """Called in the round's thread; the main thread passes it on while it waits."""
        self.said = (done, total, unit)


@dataclass(kw_only=True)
class Asynchronous(OnPolicy):
    """Samples ahead. See `OnPolicy` for what is drawn.

    Args:
        trainer_version: how many updates the trained weights carry now.
        updates_per_iteration: the trainer makes at most.
    """

    samples_ahead: ClassVar[bool] = True

    max_staleness: int
    buffer_size: int | None
    in_flight: Literal["keep", "keep_cache", "wait", "abort"]

    trainer_version: Callable[[], int]
    updates_per_iteration: int
    num_iterations: int

    _rounds: dict[int, Round] = field(default_factory=dict, init=False)
    _next: int | None = field(default=None, init=False)  # the iteration that is trained on next; None before the start
    _known: tuple[int, int] = field(default=(0, 0), init=False)  # an iteration, and the trainer's version before it
    _served: int = field(default=0, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _counted_to_s: float = field(default=0.0, init=False)
    _idle_s: float = field(default=0.0, init=False)
    _num_discarded: int = field(default=0, init=False)
    _num_queued: int = field(default=0, init=False)
    _metrics: Metrics = field(default_factory=dict, init=False)

    @staticmethod
    def check(config: RunConfig) -> None:
        OnPolicy.check(config)
        settings, loss = config.rollouts, config.train.loss
        staleness, buffer_size = settings["max_staleness"], settings["buffer_size"]
        fix = "generation samples in this process; use generation=vllm_server, or rollouts=on_policy"
        require(config.engine is not None, "rollouts", "async", fix)
        problems, interval = config.data.problems_per_iteration, config.weight_sync.get("interval", 1)
        fix = f"must have room for an iteration, data.problems_per_iteration={problems}; null has no bound"
        require(buffer_size is None or buffer_size >= problems, "rollouts.buffer_size", buffer_size, fix)
        least = interval * config.planned_updates
        other = "0 samples as rollouts=on_policy does" if interval == 1 else "0 takes weight_sync.interval=1"
        versions = f"{config.planned_updates} versions with weight_sync.interval={interval}"
        fix = f"an iteration makes up to {versions}; rollouts.max_staleness={least} samples ahead, and {other}"
        require(staleness >= least or (staleness == 0 and interval == 1), "rollouts.max_staleness", staleness, fix)
        uncorrected = loss.get("ratio_reference") == "old" and loss.get("importance_correction") == "none"
        fix = "corrects nothing for older weights; use token_truncate, or train.loss.ratio_reference=rollout"
        require(staleness == 0 or not uncorrected, "train.loss.importance_correction", "none", fix)

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Begins to sample."""
        super().start(iteration, state)
        self._counted_to_s = time.perf_counter()
        self._next, self._known = iteration, (iteration, self.trainer_version())
        self._begin_due()

    def next(self, iteration: int) -> list[RolloutGroup]:
        """Waits for the iteration's groups."""
        began = time.perf_counter()
        version = self.trainer_version()
        self._next, self._known = iteration, (iteration, version)
        # 1. However fresh samples are, the weights that draw them must not be too old.
        age = version - self._served
        if age > self.max_staleness:
            about = f"the engine's weights are {age} versions old; push more often"
            raise ConfigError(f"rollouts.max_staleness={self.max_staleness}: {about}")
        # 2. Wait for the iteration; an error of any is raised at once. What has become too old is drawn again.
        sampling_s = 0.0
        while True:
            self._begin_due()
            rounds, mine = list(self._rounds.values()), self._rounds[iteration]
            for each in rounds:
                if each.groups.done():
                    each.groups.result()
            if not mine.groups.done():
                progress.report(*mine.said)
                wait([each.groups for each in rounds if not each.groups.done()], TICK_S, FIRST_COMPLETED)
                continue
            groups = self._rounds.pop(iteration).groups.result()
            sampling_s += mine.seconds
            ages = [version - v for group in groups for r in group.rollouts for v in compress(r.versions, r.is_sampled)]
            if max(ages, default=0) <= self.max_staleness:
                break
            self._num_discarded += len(groups)
        # 3. There is room for another iteration while this one is trained on.
        self._next = iteration + 1
        self._begin_due()
        self._count_seconds()
        ended = [round_.groups for round_ in self._rounds.values() if round_.groups.done()]
        queued = sum(len(each.result()) for each in ended if each.exception() is None)  # an error: at the next wait
        self._metrics = {
            "async/age_mean": fmean(ages) if ages else 0.0,
            "async/age_max": float(max(ages, default=0)),
            "async/queue_groups": float(queued),
            "async/num_discarded": float(self._num_discarded),
            "async/write_count": float(len(groups) + queued - self._num_queued),
            "async/data_read_count": float(len(groups)),
            "time/rollouts_wait_s": self._counted_to_s - began,
            "time/sampling_s": sampling_s,
            "time/async_idle_s": self._idle_s,
        }
        self._num_queued, self._num_discarded, self._idle_s = queued, 0, 0.0
        return groups

    def weights_changed(self, version: int) -> None:
        """Newer weights may let an iteration begin."""
        self._served = version
        self._begin_due()

    def weights_lost(self) -> None:
        self._num_discarded += len(self._rounds) * len(range(self.problems_per_iteration)[self.rank :: self.world_size])
        self._num_queued = 0
        self._abandon()

    def metrics(self) -> Metrics:
        return {**self._metrics, **self.curriculum_metrics()}

    def close(self) -> None:
        self._next = None
        self._abandon()

    def _begin_due(self) -> None:
        """Begin every iteration that there is room for and whose rollouts cannot become too old, in order."""
        if self._next is None:
            return
        iteration, version = self._known
        size = self.buffer_size or self.num_iterations * self.problems_per_iteration
        ends = min(self.num_iterations, self._next + size // self.problems_per_iteration)
        for i in range(self._next, ends):
            if version + (i - iteration) * self.updates_per_iteration - self._served > self.max_staleness:
                return
            if i not in self._rounds:
                self._count_seconds()
                self._indices(i)  # here, so that all processes choose from the same pass rates
                round_ = self._rounds[i] = Round()
                round_.groups = in_background(partial(self._sample_round, i, round_))

    def _sample_round(self, iteration: int, round_: Round) -> list[RolloutGroup]:
        """In a thread of its own."""
        try:
            with progress.followed():
                progress.tell([round_])
                return OnPolicy.next(self, iteration)
        finally:
            self._count_seconds()
            round_.is_over = True

    def _count_seconds(self) -> None:
        """Share the seconds since the last call among the iterations that are being sampled, or count them as idle."""
        with self._counting:
            now = time.perf_counter()
            seconds, self._counted_to_s = now - self._counted_to_s, now
            sampled = [round_ for round_ in list(self._rounds.values()) if not round_.is_over]
            for round_ in sampled:
                round_.seconds += seconds / len(sampled)
            if not sampled:
                self._idle_s += seconds

    def _abandon(self) -> None:
        """End all threads, as far as that takes no longer than `END_S`."""
        self._count_seconds()
        pending, deadline = [round_.groups for round_ in self._rounds.values()], time.monotonic() + END_S
        self._rounds = {}
        while pending and time.monotonic() < deadline:
            self.client.close()  # which cancels what is asked; a thread that was between two requests may ask again
            pending = list(wait(pending, TICK_S).not_done)
