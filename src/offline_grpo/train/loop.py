"""The training loop. It knows engines, sources, evaluators, checkpoints and listeners only by the Protocols of
interfaces.py.

    (evaluate) -> for each iteration: generate -> train -> sync -> (evaluate) -> (save) -> log

The checkpoint is written before the metrics (so that they can tell how long it took) but counts only after them: a run
that is killed anywhere goes on from the last checkpoint, repeats what came after it, and ends with the same files.

A signal stops the run where the weights are those of a whole number of iterations: until the first optimizer step of an
iteration what the iteration has done so far is thrown away, and an evaluation that is cut short is owed to the run that
goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from offline_grpo import progress
from offline_grpo.errors import KEEP_OUT, EngineDied, EngineError, ForeignWrite, StopRequested
from offline_grpo.interfaces import (
    Checkpointer,
    Deployment,
    Evaluator,
    PendingCheckpoint,
    RunListener,
    Source,
    StopSignal,
)
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.experience import check_groups, check_scored, prepare_batch, rollout_metrics, score_metrics
from offline_grpo.train.flops import update_flops, utilisation
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.push_schedule import PushSchedule, frozen_metric
from offline_grpo.train.resources import card_bytes, gpu_memory, time_metrics
from offline_grpo.train.update import Updater
from offline_grpo.types import Metrics, RolloutGroup, SyncReport

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluator, the deployment that it samples from, and its schedule: after an iteration if `is_due`, and
    `before_training`.
    """

    evaluator: Evaluator
    deployment: Deployment
    before_training: bool
    is_due: Callable[[int], bool]


@dataclass(kw_only=True)
class Loop:
    """The components of a run, connected. `save_due` says whether to write a checkpoint after an iteration."""

    config: TrainConfig
    policy: Policy
    source: Source
    updater: Updater
    deployment: Deployment
    schedule: PushSchedule
    evaluation: Evaluation | None
    milestones: Milestones
    checkpointer: Checkpointer | None
    save_due: Callable[[int], bool]
    listeners: Sequence[RunListener]
    ranks: Ranks
    stop: StopSignal
    stop_at_failed_frac: float | None
    fills_updates: bool
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _card_bytes: int = field(default=0, init=False)
    _flops: float = field(default=0.0, init=False)
    _start_metrics: dict[str, float] = field(default_factory=dict, init=False)
    _num_recoveries: int = field(default=0, init=False)
    _num_foreign_writes: int = field(default=0, init=False)
    _last_saved: int | None = field(default=None, init=False)

    def run(
        self, first_iteration: int, source_state: Mapping[str, Any] | None, *, owes_evaluation: bool = False
    ) -> None:
        """Train until the configured number of iterations, or until `milestones` say stop, from `first_iteration` on (0
        for a new run).

        Args:
            source_state: what the source returned for the checkpoint that the run goes on from, None for a new run.
            owes_evaluation: the evaluation before `first_iteration` was interrupted, and comes first.

        Raises:
            StopRequested: a signal came; the state after the last complete iteration has been saved.
        """
        self._last_saved = first_iteration - 1 if first_iteration > 0 else None
        with self._interruptible():
            self._push_first()
            self.ranks.gather_results(lambda: [self.source.start(first_iteration, source_state)])
        if self.evaluation is not None and self.evaluation.before_training and first_iteration == 0:
            self._evaluate_alone(self.evaluation, -1)
        if self.evaluation is not None and owes_evaluation:
            self._evaluate_alone(self.evaluation, first_iteration - 1)
            if self.checkpointer is not None:
                self._write(self.checkpointer, first_iteration - 1).commit()  # again: it may be the best one now
        self._start_metrics = progress.start_metrics()
        log.info(progress.describe_start())
        for iteration in range(first_iteration, self.config.iterations):
            if (reason := self.milestones.stop_reason) is not None:
                log.info("stopped early after iteration %d: %s", iteration, reason)
                return
            self._iterate(iteration)

    def _evaluate_alone(self, evaluation: Evaluation, iteration: int) -> None:
        with self._interruptible():
            metrics = self._evaluate(evaluation, iteration)
        self.milestones.see(metrics, iteration)
        self._log({"eval": {**metrics, **self.milestones.early_end(iteration, self.config.iterations)}}, iteration)

    def _iterate(self, iteration: int) -> None:
        self._seconds, self._card_bytes, self._flops = {}, 0, 0.0
        number = iteration + 1
        with self._safe_point(iteration):
            with self._phase("generate", iteration):
                groups = self._sample(self.deployment, lambda: check_groups(self.source.next(iteration)))
            with self._phase("train", iteration):
                metrics = {**rollout_metrics(groups), **self.source.metrics(), **self._train(groups, iteration)}
        evaluation = self.evaluation if self.evaluation is not None and self.evaluation.is_due(iteration) else None
        self.stop.hold(f"the weight sync of iteration {number}")
        with self._phase("sync", iteration):
            metrics |= self._push(force=evaluation is not None)
        eval_metrics, stopped = None, None
        try:
            if evaluation is not None:
                with self._interruptible():
                    eval_metrics = self._evaluate(evaluation, iteration)
        except StopRequested as signal:
            stopped = signal
        self.stop.hold(f"the record of iteration {number}")
        is_milestone = eval_metrics is not None and self.milestones.see(eval_metrics, iteration)
        with self._phase("checkpoint", iteration):
            pending = None
            if self.checkpointer is not None and (self.save_due(iteration) or is_milestone or stopped is not None):
                pending = self._write(self.checkpointer, iteration, owes_evaluation=stopped is not None)
        metrics |= self.milestones.early_end(iteration, self.config.iterations)
        metrics |= time_metrics(self._seconds, metrics) | self._start_metrics
        metrics |= gpu_memory(self.policy.compute_device, self._card_bytes)
        metrics |= utilisation(self._flops, self._seconds["train"], self.policy.compute_device, self.ranks.world_size)
        self._start_metrics = {}
        self._log({"train": metrics} | ({} if eval_metrics is None else {"eval": eval_metrics}), iteration)
        if pending is not None:
            pending.commit()
            self._last_saved = iteration
        if stopped is not None:
            raise stopped

    def _train(self, groups: Sequence[RolloutGroup], iteration: int) -> dict[str, float]:
        batch, advantages, metrics = self._on_own_weights(
            lambda: prepare_batch(groups, self.updater, self.config, fills_updates=self.fills_updates)
        )
        for listener in self.listeners:
            listener.rollouts("train", groups, advantages=advantages, iteration=iteration)
        if iteration == 0:
            metrics["num_trainable_parameters"] = float(self.policy.num_trainable)
        if batch is None:
            return metrics | {"num_updates": 0.0}
        metrics["num_tokens_trained"] = float(batch.completion_mask.sum()) * self.config.epochs
        self._flops = update_flops(self.policy.causal_lm, batch.sequence_lengths) * self.config.epochs
        commit = partial(self._commit_to, iteration)
        return metrics | self.updater.run(
            batch, iteration=iteration, before_step=commit, on_own_weights=self._on_own_weights
        )

    def _evaluate(self, evaluation: Evaluation, iteration: int) -> Metrics:
        evaluator, deployment, cycle = evaluation.evaluator, evaluation.deployment, iteration + 1
        with self._phase("eval", iteration):
            if deployment is not self.deployment:
                deployment.push(self.policy, version=self._version)
            groups = self._sample(deployment, lambda: evaluator.sample(deployment.client, cycle=cycle))
            for listener in self.listeners:
                listener.rollouts("eval", groups, advantages=None, iteration=iteration)
            return {**evaluator.metrics(groups, cycle=cycle), **score_metrics(groups), **frozen_metric(deployment)}

    @property
    def _version(self) -> int:
        return self.updater.counters.version

    def _push_first(self) -> None:
        """Push the first weights: the policy's, or in a resumed run the possibly older ones that the engine served at
        the checkpoint.
        """
        with progress.phase("sync"), self.schedule.served_weights(self.policy, self._version) as version:
            report = self._recovering(self.deployment, lambda: self.deployment.push(self.policy, version=version))
        self.schedule.connected(self.policy, report.version)
        self.source.weights_changed(self.schedule.version)

    def _push(self, *, force: bool) -> Metrics:
        """Push if the schedule, or an evaluation (`force`), wants it."""
        if self.schedule.is_due(force=force):
            report = self._recovering(self.deployment, self._push_now)
            self.schedule.pushed(self.policy, report.version)
            self.source.weights_changed(report.version)
        else:
            report = SyncReport(
                version=self.schedule.version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0
            )
        return {
            **report.metrics(),
            **frozen_metric(self.deployment),
            **self.deployment.metrics(),
            "sync/num_recoveries": float(self._num_recoveries),
            "sync/num_foreign_writes": float(self._num_foreign_writes),
        }

    def _push_now(self) -> SyncReport:
        return self.deployment.push(self.policy, version=self._version, amid_requests=self.source.samples_ahead)

    def _sample(self, deployment: Deployment, share: Callable[[], list[RolloutGroup]]) -> list[RolloutGroup]:
        """The groups of all processes, each of which samples its `share`, from the weights of the last push and no
        others.
        """

        def sample() -> list[RolloutGroup]:
            with (
                self.updater.sharding.gathered(self.policy) if deployment.client.engine_name is None else nullcontext()
            ):
                groups = self.ranks.gather_interleaved(share)
            deployment.check_served()
            check_scored(groups, self.stop_at_failed_frac)
            return groups

        return self._recovering(deployment, sample)

    def _recovering(self, deployment: Deployment, action: Callable[[], T]) -> T:
        """Run `action`; if the engine dies or loses the weights, recover it and run `action` once more, from the same
        state.

        A second time in a row ends the run.
        """
        try:
            return action()
        except EngineDied as death:
            is_foreign = isinstance(death, ForeignWrite)
            self._num_foreign_writes += is_foreign
            self._num_recoveries += not is_foreign
            self.stop.hold("the recovery of the server")  # the policy may have other weights meanwhile
            log.warning("%s Serving the weights again.", death)
            if deployment is self.deployment:
                self.source.weights_lost()
                with self.schedule.served_weights(self.policy, self._version) as version:
                    deployment.recover(self.policy, version=version)
                self.source.weights_changed(0 if deployment.is_frozen else version)
            else:
                deployment.recover(self.policy, version=self._version)
            return action()

    def _on_own_weights(self, action: Callable[[], T]) -> T:
        """What `action` computes from the policy's weights; once more, where somebody else wrote to them meanwhile.
        Twice ends the run.
        """
        result = action()
        for is_last in (False, True):
            if not (names := self.deployment.mend(self.policy)):
                break
            self._num_foreign_writes += 1
            what = f"somebody else has written to {len(names)} of the policy's tensors through the server ({', '.join(names[:3])})"
            if is_last:
                raise EngineError(f"{what}, twice in a row: {KEEP_OUT}")
            log.warning("%s: their values were written back, and what was computed from them is computed again", what)
            result = action()
        return result

    def _write(self, checkpointer: Checkpointer, iteration: int, *, owes_evaluation: bool = False) -> PendingCheckpoint:
        num_before = self._num_foreign_writes
        pending = self._on_own_weights(lambda: checkpointer.write(iteration, owes_evaluation=owes_evaluation))
        if self._num_foreign_writes > num_before:  # a server with mended weights is paused until the next push
            self._recovering(self.deployment, self._push_now)
        return pending

    def _commit_to(self, iteration: int) -> None:
        """The weights change from here on: the last place to stop before the iteration is complete."""
        self._stop_if_requested()
        self.stop.hold(f"the updates of iteration {iteration + 1}")

    @contextmanager
    def _safe_point(self, iteration: int) -> Iterator[None]:
        """Work that a signal may interrupt: the weights are still those after the previous iteration, and are saved if
        they are not yet.
        """
        try:
            with self._interruptible():
                yield
        except StopRequested:
            if self.checkpointer is not None and iteration > 0 and self._last_saved != iteration - 1:
                log.info("saving the state after iteration %d", iteration)
                self._write(self.checkpointer, iteration - 1).commit()
            raise

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Work that a signal may cut short. Several processes must all stop at the same place, which is the beginning."""
        self._stop_if_requested()
        with self.stop.interruptible(allowed=self.ranks.world_size == 1):
            yield

    def _stop_if_requested(self) -> None:
        if (number := self.ranks.first(self.stop.number)) is not None:
            self.stop.raise_now(number)

    @contextmanager
    def _phase(self, name: str, iteration: int) -> Iterator[None]:
        started = time.perf_counter()
        with progress.phase(name, iteration):
            yield
        self._seconds[name] = time.perf_counter() - started
        self._card_bytes = max(
            self._card_bytes, card_bytes(self.policy.compute_device)
        )  # torch keeps what a phase needed at most

    def _log(self, record: Mapping[str, Metrics], iteration: int) -> None:
        for listener in self.listeners:  # the whole record to each: a later one may raise
            for name, metrics in record.items():
                listener.log(name, metrics, iteration=iteration)
