"""The training loop. It knows engines, sources, evaluators, checkpoints and listeners only by the Protocols of
interfaces.py.

    (evaluate) -> for each iteration: generate -> train -> sync -> (evaluate) -> (save) -> log

The checkpoint is written before the metrics (so that they can tell how long it took) but counts only after them: a run
that is killed anywhere resumes from the last checkpoint, repeats what came after it, and ends with the same files.

A signal ends sampling at once, and anything else at the end of its iteration. The state after the last complete
iteration is saved. An evaluation that was cut short is made up for by the resumed run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offline_grpo import progress
from offline_grpo.errors import EngineDied, StopRequested
from offline_grpo.interfaces import Checkpointer, Deployment, Evaluator, RunListener, Source, StopSignal
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.experience import check_groups, check_scored, prepare_batch, rollout_metrics, score_metrics
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.resources import card_bytes, gpu_memory, time_metrics, update_flops, utilisation
from offline_grpo.train.update import Updater
from offline_grpo.types import Metrics, RolloutGroup, SyncReport

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluator, the deployment that it samples from, and when it does so."""

    evaluator: Evaluator
    deployment: Deployment
    before_training: bool
    is_due: Callable[[int], bool]


@dataclass(kw_only=True)
class Loop:
    """The components of a run, connected.

    Args:
        push_interval: iterations from one push to the next; in between the engine samples from older weights.
        save_due: whether to write a checkpoint after an iteration.
    """

    config: TrainConfig
    policy: Policy
    source: Source
    updater: Updater
    deployment: Deployment
    push_interval: int
    evaluation: Evaluation | None
    milestones: Milestones
    checkpointer: Checkpointer | None
    save_due: Callable[[int], bool]
    listeners: Sequence[RunListener]
    ranks: Ranks
    stop: StopSignal
    on_failure: str
    stop_at_failed_frac: float | None
    fills_updates: bool
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _card_bytes: int = field(default=0, init=False)
    _flops: float | None = field(default=0.0, init=False)
    _start_metrics: dict[str, float] = field(default_factory=dict, init=False)
    _num_recoveries: int = field(default=0, init=False)
    _num_skipped: int = field(default=0, init=False)  # iterations since the last push
    _served_version: int = field(default=0, init=False)
    _num_done: int = field(default=0, init=False)  # complete iterations, and those in the newest checkpoint
    _num_saved: int = field(default=0, init=False)

    def run(
        self, first_iteration: int, source_state: Mapping[str, Any] | None, *, evaluates_first: bool = False
    ) -> None:
        """Train from `first_iteration` (0 for a new run) to the last one, or until `milestones` say stop.

        Args:
            source_state: what the source returned for the checkpoint that the run resumes from, None for a new run.
            evaluates_first: the evaluation after iteration `first_iteration - 1` was cut short.

        Raises:
            StopRequested: a signal came; the state after the last complete iteration has been saved.
        """
        self._num_done = self._num_saved = first_iteration
        with self._interruptible():
            with progress.phase("sync"):
                self._recovering(self.deployment, self._push_now)
            self.ranks.gather_results(lambda: [self.source.start(first_iteration, source_state)])
        is_new = first_iteration == 0
        if self.evaluation is not None and (self.evaluation.before_training if is_new else evaluates_first):
            self._evaluate_first(self.evaluation, first_iteration - 1)
        self._start_metrics = progress.start_metrics()
        for line in progress.describe_start():
            log.info(line)
        try:
            for iteration in range(first_iteration, self.config.iterations):
                if (reason := self.milestones.stop_reason) is not None:
                    log.info("stopped early after iteration %d: %s", iteration, reason)
                    return
                self._iterate(iteration)
        except StopRequested:
            if self.checkpointer is not None and self._num_saved < self._num_done:
                log.info("saving the state after iteration %d", self._num_done)
                self.checkpointer.write(self._num_done - 1)
                self.checkpointer.commit(self._num_done - 1)
            raise

    def _evaluate_first(self, evaluation: Evaluation, iteration: int) -> None:
        metrics = self._evaluate(evaluation, iteration)
        self.milestones.see(metrics, iteration)
        self._log({"eval": {**metrics, **self.milestones.early_end(iteration, self.config.iterations)}}, iteration)
        if self.checkpointer is not None and iteration >= 0:
            self.checkpointer.write(iteration)  # again: it may be the best one now
            self.checkpointer.commit(iteration)

    def _iterate(self, iteration: int) -> None:
        self._seconds, self._card_bytes, self._flops = {}, 0, 0.0
        with self._phase("generate", iteration), self._interruptible():
            groups = self._sample(self.deployment, lambda: check_groups(self.source.next(iteration)))
        groups = [group.with_failures(self.on_failure) for group in groups]
        self.source.sampled(iteration, groups)
        with self._phase("train", iteration):
            metrics = {**rollout_metrics(groups), **self.source.metrics(), **self._train(groups, iteration)}
        evaluation = self.evaluation if self.evaluation is not None and self.evaluation.is_due(iteration) else None
        with self._phase("sync", iteration):
            metrics |= self._push(force=evaluation is not None)
        eval_metrics, signal = self._evaluate_unless_stopped(evaluation, iteration)
        is_milestone = eval_metrics is not None and self.milestones.see(eval_metrics, iteration)
        with self._phase("checkpoint", iteration):
            due = self.checkpointer if self.save_due(iteration) or is_milestone else None
            if due is not None:
                due.write(iteration)
        metrics |= self.milestones.early_end(iteration, self.config.iterations) | self._cost(metrics)
        self._log({"train": metrics} | ({} if eval_metrics is None else {"eval": eval_metrics}), iteration)
        self._num_done = iteration + 1
        if due is not None:
            due.commit(iteration)
            self._num_saved = self._num_done
        if signal is not None:
            raise signal

    def _train(self, groups: Sequence[RolloutGroup], iteration: int) -> dict[str, float]:
        began = time.perf_counter()
        groups = self.updater.taught(groups)
        teacher_s = time.perf_counter() - began
        batch, advantages, metrics = prepare_batch(groups, self.updater, self.config, fills_updates=self.fills_updates)
        if self.updater.teacher is not None:
            metrics["time/teacher_s"] = teacher_s
        for listener in self.listeners:
            listener.rollouts("train", groups, advantages=advantages, iteration=iteration)
        if iteration == 0:
            metrics["num_trainable_parameters"] = float(self.policy.num_trainable)
        if batch is None:
            return metrics | {"num_updates": 0.0}
        metrics["num_tokens_trained"] = float(batch.completion_mask.sum()) * self.config.epochs
        flops = update_flops(self.policy.causal_lm, batch.sequence_lengths)
        self._flops = None if flops is None else flops * self.config.epochs
        return metrics | self.updater.run(batch, iteration=iteration)

    def _evaluate(self, evaluation: Evaluation, iteration: int) -> Metrics:
        evaluator, deployment, cycle = evaluation.evaluator, evaluation.deployment, iteration + 1
        with self._phase("eval", iteration), self._interruptible():
            if deployment is not self.deployment:
                self._recovering(deployment, lambda: deployment.push(self.policy, version=self._version))
            groups = self._sample(deployment, lambda: evaluator.sample(deployment.client, cycle=cycle))
            for listener in self.listeners:
                listener.rollouts("eval", groups, advantages=None, iteration=iteration)
            return {**evaluator.metrics(groups, cycle=cycle), **score_metrics(groups), **_frozen_metric(deployment)}

    def _evaluate_unless_stopped(
        self, evaluation: Evaluation | None, iteration: int
    ) -> tuple[Metrics | None, StopRequested | None]:
        """The metrics, or the signal that ended the evaluation. The iteration itself is complete, and is recorded."""
        try:
            return (None if evaluation is None else self._evaluate(evaluation, iteration)), None
        except StopRequested as signal:
            return None, signal

    @property
    def _version(self) -> int:
        return self.updater.counters.version

    def _push(self, *, force: bool) -> Metrics:
        """Push if it is the iteration to do so, or if an evaluation wants the newest weights (`force`)."""
        self._num_skipped += 1
        report = SyncReport(self._served_version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)
        if force or self._num_skipped >= self.push_interval:
            report = self._recovering(self.deployment, self._push_now)
        return {
            **report.metrics(),
            **_frozen_metric(self.deployment),
            **self.deployment.metrics(),
            "sync/num_recoveries": float(self._num_recoveries),
        }

    def _push_now(self) -> SyncReport:
        amid_requests = self.source.samples_ahead
        return self._pushed(self.deployment.push(self.policy, version=self._version, amid_requests=amid_requests))

    def _pushed(self, report: SyncReport) -> SyncReport:
        self._num_skipped, self._served_version = 0, report.version
        self.source.weights_changed(report.version)
        return report

    def _sample(self, deployment: Deployment, share: Callable[[], list[RolloutGroup]]) -> list[RolloutGroup]:
        """The groups of all processes, each of which samples its `share`, from the weights of the last push alone."""

        def sample() -> list[RolloutGroup]:
            is_own = deployment.client.is_local  # it samples from the policy's module
            with self.updater.sharding.gathered(self.policy) if is_own else nullcontext():
                groups = self.ranks.gather_interleaved(share)
            deployment.check_served()
            check_scored(groups, self.stop_at_failed_frac)
            return groups

        return self._recovering(deployment, sample)

    def _recovering(self, deployment: Deployment, action: Callable[[], T]) -> T:
        """Run `action`; if the engine dies, start it again and run `action` once more. A second death ends the run."""
        try:
            return action()
        except EngineDied as death:
            self._num_recoveries += 1
            log.warning("%s Serving the weights again.", death)
            if deployment is self.deployment:
                self.source.weights_lost()
                self._pushed(deployment.recover(self.policy, version=self._version))
            else:
                deployment.recover(self.policy, version=self._version)
            return action()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Sampling, which a signal ends at once. Several processes must all stop at the same place: the beginning."""
        if (number := self.ranks.first(self.stop.number)) is not None:
            raise StopRequested(number)
        with self.stop.interruptible(allowed=self.ranks.world_size == 1):
            yield

    @contextmanager
    def _phase(self, name: str, iteration: int) -> Iterator[None]:
        started = time.perf_counter()
        with progress.phase(name, iteration):
            yield
        self._seconds[name] = time.perf_counter() - started
        # torch keeps what a phase needed at most
        self._card_bytes = max(self._card_bytes, card_bytes(self.policy.compute_device))

    def _cost(self, metrics: Metrics) -> dict[str, float]:
        device, start_metrics, self._start_metrics = self.policy.compute_device, self._start_metrics, {}
        return {
            **time_metrics(self._seconds, metrics),
            **start_metrics,
            **gpu_memory(device, self._card_bytes),
            **utilisation(self._flops, self._seconds["train"], device, self.ranks.world_size),
        }

    def _log(self, record: Mapping[str, Metrics], iteration: int) -> None:
        for listener in self.listeners:  # the whole record to each: a later one may raise
            for name, metrics in record.items():
                listener.log(name, metrics, iteration=iteration)


def _frozen_metric(deployment: Deployment) -> dict[str, float]:
    """A mark in every record of engines that do not follow the policy."""
    return {"sync/frozen": 1.0} if deployment.is_frozen else {}
