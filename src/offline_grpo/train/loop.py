"""The training loop, the same for every mode: it knows the Protocols of interfaces.py and nothing else.

    (evaluate) -> for each iteration: generate -> train -> sync -> (evaluate) -> (save) -> log

The checkpoint is written before the metrics (so that they can tell how long it took) but counts only after them: a run that is killed
anywhere goes on from the last checkpoint, repeats what came after it, and ends with the same files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from offline_grpo.errors import EngineDied, GrpoError, StopRequested
from offline_grpo.interfaces import (
    Checkpointer,
    Evaluator,
    MetricLogger,
    PendingCheckpoint,
    PhaseListener,
    RolloutClient,
    RolloutSource,
    StopSignal,
    WeightSync,
)
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.experience import prepare_batch, rollout_metrics
from offline_grpo.train.update import Updater
from offline_grpo.types import Metrics, RolloutGroup

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Loop:
    """The components of a run, connected. `save_due` and `eval_due` say whether to do so after an iteration; `eval_sync` serves
    evaluations that ask another engine than training does."""

    config: TrainConfig
    policy: Policy
    source: RolloutSource
    updater: Updater
    weight_sync: WeightSync
    eval_client: RolloutClient
    eval_sync: WeightSync | None
    evaluator: Evaluator | None
    checkpointer: Checkpointer | None
    loggers: Sequence[MetricLogger]
    ranks: Ranks
    stop: StopSignal
    temperature: float
    eval_first: bool
    eval_due: Callable[[int], bool]
    save_due: Callable[[int], bool]
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _num_recoveries: int = field(default=0, init=False)
    _last_saved: int | None = field(default=None, init=False)

    def run(self, first_iteration: int) -> None:
        """Train until the configured number of iterations, from `first_iteration` on (0: anew).

        Raises:
            StopRequested: a signal came; the state after the last complete iteration has been saved.
        """
        self._last_saved = first_iteration - 1 if first_iteration > 0 else None
        self._push(force=True)
        if self.eval_first and first_iteration == 0:
            with self._safe_point(-1):
                self._log("eval", self._evaluate(-1), -1)
        for iteration in range(first_iteration, self.config.iterations):
            self._iterate(iteration)

    def _iterate(self, iteration: int) -> None:
        self._seconds = {}
        with self._safe_point(iteration), self._phase("generate", iteration):
            groups = self._sampled(self.weight_sync, lambda: self.source.next(iteration))
        with self._phase("train", iteration):
            metrics = rollout_metrics(groups) | self._train(groups, iteration)
        with self._phase("sync", iteration):
            metrics |= self._push(force=self.eval_due(iteration))
        evaluation = self._evaluate(iteration) if self.eval_due(iteration) else None
        with self._phase("checkpoint", iteration):
            pending = self._write_checkpoint(iteration) if self.save_due(iteration) else None
        if evaluation is not None:
            self._log("eval", evaluation, iteration)
        self._log("train", metrics | self._time_metrics(metrics), iteration)
        if pending is not None:
            pending.commit()
            self._last_saved = iteration

    def _train(self, groups: Sequence[RolloutGroup], iteration: int) -> dict[str, float]:
        batch, metrics = prepare_batch(groups, self.updater, self.config, temperature=self.temperature)
        if batch is None:
            return metrics | {"num_updates": 0.0}
        return metrics | self.updater.run(batch, iteration=iteration)

    def _evaluate(self, iteration: int) -> Metrics:
        assert self.evaluator is not None
        with self._phase("eval", iteration):
            if self.eval_sync is not None:
                self.eval_sync.push(self.policy, version=self._version)
            evaluator = self.evaluator
            return self._sampled(self.eval_sync or self.weight_sync, lambda: evaluator.evaluate(self.eval_client, cycle=iteration + 1))

    @property
    def _version(self) -> int:
        return self.updater.counters.version

    def _push(self, *, force: bool) -> Metrics:
        report = self._recovering(self.weight_sync, lambda: self.weight_sync.push(self.policy, version=self._version, force=force))
        return report.metrics() | {"sync/num_recoveries": float(self._num_recoveries)}

    def _sampled(self, weight_sync: WeightSync, action: Callable[[], T]) -> T:
        """What `action` samples, from the weights of the last push and no others."""

        def sample() -> T:
            samples = action()
            weight_sync.check_served()
            return samples

        return self._recovering(weight_sync, sample)

    def _recovering(self, weight_sync: WeightSync, action: Callable[[], T]) -> T:
        """Do it, and if the engine died of it, once more with a new engine: sampling and pushing start from the same state again."""
        try:
            return action()
        except EngineDied as death:
            self._num_recoveries += 1
            log.warning("%s Serving the weights again.", death)
            weight_sync.recover(self.policy, version=self._version)
            return action()

    def _write_checkpoint(self, iteration: int) -> PendingCheckpoint | None:
        """Written by the first process, where all learn whether that went well. None on the others."""
        assert self.checkpointer is not None
        error: GrpoError | None = None
        pending = None
        if self.ranks.is_main:
            try:
                pending = self.checkpointer.write(iteration)
            except GrpoError as caught:
                error = caught
        error = self.ranks.from_main(error)
        if error is not None:
            raise error
        return pending

    @contextmanager
    def _safe_point(self, iteration: int) -> Iterator[None]:
        """Work that a signal may cut short: the weights are still those after the previous iteration, and are saved if they are not yet."""
        try:
            if self.ranks.any(self.stop.is_requested):
                self.stop.raise_now()
            with self.stop.interruptible(allowed=self.ranks.world_size == 1):
                yield
        except StopRequested:
            if self.checkpointer is not None and iteration > 0 and self._last_saved != iteration - 1:
                pending = self._write_checkpoint(iteration - 1)
                if pending is not None:
                    pending.commit()
            raise

    @contextmanager
    def _phase(self, name: str, iteration: int) -> Iterator[None]:
        for listener in self.loggers:
            if isinstance(listener, PhaseListener):
                listener.phase(name, iteration)
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started

    def _time_metrics(self, metrics: Metrics) -> dict[str, float]:
        total = sum(self._seconds.values())
        rates = {"time/iteration_s": total, "perf/tokens_per_s": metrics["num_completion_tokens"] / total}
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | rates

    def _log(self, name: str, metrics: Metrics, iteration: int) -> None:
        for logger in self.loggers:
            logger.log(name, metrics, iteration=iteration)
