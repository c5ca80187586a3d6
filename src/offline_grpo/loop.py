"""The training loop: what every iteration of a run does, in its order.

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
from typing import TypeVar

from offline_grpo import progress
from offline_grpo.errors import EngineDied, StopRequested
from offline_grpo.state import Run
from offline_grpo.train.experience import check_groups, check_scored, prepare_batch
from offline_grpo.train.metrics import (
    card_bytes,
    gpu_memory,
    rollout_metrics,
    score_metrics,
    time_metrics,
    update_flops,
    utilisation,
)
from offline_grpo.types import Metrics, RolloutGroup, SyncReport
from offline_grpo.weight_sync.deployment import Deployment

T = TypeVar("T")

log = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Train from the first iteration, or the one after the checkpoint, to the last, or until `milestones` say stop.

    Raises:
        StopRequested: a signal came; the state after the last complete iteration has been saved.
    """
    restored, loop = run.restored, Loop(run)
    first = 0 if restored is None else restored.iteration + 1
    loop.num_done = loop.num_saved = first

    # Engines get version 0, or the checkpoint's, and prove it, before anything is sampled.
    with loop.interruptible():
        with progress.phase("sync"):
            loop.recovering(run.training, loop.push_now)
        run.ranks.gather_results(lambda: [run.source.start(first, None if restored is None else restored.source)])

    # The evaluation before any training, or the one that a stop cut short.
    if run.evaluator is not None:
        is_due = run.config.eval.eval_first
        if restored is not None:
            is_due = run.ranks.on_main(lambda: run.folder.misses_evaluation(restored))
        if is_due:
            loop.evaluate_first(first - 1)

    loop.start_metrics = progress.start_metrics()
    for line in progress.describe_start():
        log.info(line)
    try:
        for iteration in range(first, run.config.train.iterations):
            if (reason := run.milestones.stop_reason) is not None:
                log.info("stopped early after iteration %d: %s", iteration, reason)
                return
            loop.iterate(iteration)
    except StopRequested:
        # What was trained since the last checkpoint is not lost.
        if run.checkpointer is not None and loop.num_saved < loop.num_done:
            log.info("saving the state after iteration %d", loop.num_done)
            run.checkpointer.write(loop.num_done - 1)
            run.checkpointer.commit(loop.num_done - 1)
        raise


class Loop:
    """A run's iterations, and what they hand on to the next one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_done = self.num_saved = 0  # complete iterations, and those in the newest checkpoint
        self.start_metrics: dict[str, float] = {}  # for the first record
        self.num_recoveries = 0
        self._num_skipped = 0  # iterations since the last push
        self._served_version = 0
        self._seconds: dict[str, float] = {}  # this iteration's: of each phase, memory of the GPU, work
        self._card_bytes = 0
        self._flops: float | None = 0.0

    def iterate(self, iteration: int) -> None:
        run = self.run
        self._seconds, self._card_bytes, self._flops = {}, 0, 0.0

        # 1. Every process samples its share of the groups; then all have all of them.
        with self._phase("generate", iteration), self.interruptible():
            groups = self.sample(run.training, lambda: check_groups(run.source.next(iteration)))
        groups = [group.with_failures(run.config.scoring.on_failure) for group in groups]
        run.source.sampled(iteration, groups)

        # 2. Rewards become advantages, and those updates of the policy.
        with self._phase("train", iteration):
            metrics = {**rollout_metrics(groups), **run.source.metrics(), **self._train(groups, iteration)}

        # 3. The engines get the new weights when it is time, and before evaluations, and prove that they serve them.
        evaluates = run.evaluator is not None and self._is_due(iteration, run.config.eval.interval)
        with self._phase("sync", iteration):
            metrics |= self.push(force=evaluates)

        # 4. A stop that cuts the evaluation short ends the run once this iteration, which is complete, is on record.
        eval_metrics, signal = self._evaluate_unless_stopped(iteration) if evaluates else (None, None)
        is_milestone = eval_metrics is not None and run.milestones.see(eval_metrics, iteration)

        # 5. Write the checkpoint, then the metrics; then the checkpoint counts.
        saves = is_milestone or self._is_due(iteration, run.config.checkpoint.save_interval)
        due = run.checkpointer if saves else None
        with self._phase("checkpoint", iteration):
            if due is not None:
                due.write(iteration)
        metrics |= run.milestones.early_end(iteration, run.config.train.iterations) | self._cost(metrics)
        self._log({"train": metrics} | ({} if eval_metrics is None else {"eval": eval_metrics}), iteration)
        self.num_done = iteration + 1
        if due is not None:
            due.commit(iteration)
            self.num_saved = self.num_done
        if signal is not None:
            raise signal

    def evaluate_first(self, iteration: int) -> None:
        """An evaluation before the first iteration of this start, after `iteration`, which has been saved."""
        run, metrics = self.run, self._evaluate(iteration)
        run.milestones.see(metrics, iteration)
        self._log({"eval": {**metrics, **run.milestones.early_end(iteration, run.config.train.iterations)}}, iteration)
        if run.checkpointer is not None and iteration >= 0:
            run.checkpointer.write(iteration)  # again: it may be the best one now
            run.checkpointer.commit(iteration)

    def push(self, *, force: bool) -> Metrics:
        """Push if it is the iteration to do so, or if an evaluation wants the newest weights (`force`)."""
        engines = self.run.training
        self._num_skipped += 1
        report = SyncReport(self._served_version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)
        if force or self._num_skipped >= self.run.plan.weight_sync.interval:
            report = self.recovering(engines, self.push_now)
        return {
            **report.metrics(),
            **_frozen_metric(engines),
            **engines.metrics(),
            "sync/num_recoveries": float(self.num_recoveries),
        }

    def push_now(self) -> SyncReport:
        run, amid_requests = self.run, self.run.source.samples_ahead
        return self._pushed(run.training.push(run.policy, version=self._version, amid_requests=amid_requests))

    def sample(self, engines: Deployment, share: Callable[[], list[RolloutGroup]]) -> list[RolloutGroup]:
        """The groups of all processes, each of which samples its `share`, from the weights of the last push alone."""
        run = self.run

        def sample() -> list[RolloutGroup]:
            is_own = engines.client.is_local  # it samples from the policy's module
            with run.sharding.gathered(run.policy) if is_own else nullcontext():
                groups = run.ranks.gather_interleaved(share)
            engines.check_served()
            check_scored(groups, run.config.scoring.stop_at_failed_frac)
            return groups

        return self.recovering(engines, sample)

    def recovering(self, engines: Deployment, action: Callable[[], T]) -> T:
        """Run `action`; if an engine dies, start it again and run `action` once more. A second death ends the run."""
        try:
            return action()
        except EngineDied as death:
            self.num_recoveries += 1
            log.warning("%s Serving the weights again.", death)
            if engines is self.run.training:
                self.run.source.weights_lost()
                self._pushed(engines.recover(self.run.policy, version=self._version))
            else:
                engines.recover(self.run.policy, version=self._version)
            return action()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Sampling, which a signal ends at once. Several processes must all stop at the same place: the beginning."""
        ranks, stop = self.run.ranks, self.run.stop
        if (number := ranks.first(stop.number)) is not None:
            raise StopRequested(number)
        with stop.interruptible(allowed=ranks.world_size == 1):
            yield

    def _train(self, groups: Sequence[RolloutGroup], iteration: int) -> Metrics:
        run, config = self.run, self.run.config
        experience = prepare_batch(groups, run.updater.passes, fills_updates=config.data.resample_zero_signal)
        metrics, batch = dict(experience.metrics), experience.batch
        for listener in run.listeners:
            listener.rollouts("train", experience.groups, advantages=experience.advantages, iteration=iteration)
        if iteration == 0:
            metrics["num_trainable_parameters"] = float(run.policy.num_trainable)
        if batch is None:
            return metrics | {"num_updates": 0.0}
        metrics["num_tokens_trained"] = float(batch.completion_mask.sum()) * config.train.epochs
        flops = update_flops(run.policy.causal_lm, batch.sequence_lengths)
        self._flops = None if flops is None else flops * config.train.epochs
        return metrics | run.updater.run(batch, iteration=iteration)

    def _evaluate(self, iteration: int) -> Metrics:
        run, engines, cycle = self.run, self.run.evaluation, iteration + 1
        evaluator = run.evaluator
        assert evaluator is not None
        with self._phase("eval", iteration), self.interruptible():
            if engines is not run.training:
                self.recovering(engines, lambda: engines.push(run.policy, version=self._version))
            groups = self.sample(engines, lambda: evaluator.sample(engines.client, cycle=cycle))
            for listener in run.listeners:
                listener.rollouts("eval", groups, advantages=None, iteration=iteration)
            return {**evaluator.metrics(groups, cycle=cycle), **score_metrics(groups), **_frozen_metric(engines)}

    def _evaluate_unless_stopped(self, iteration: int) -> tuple[Metrics | None, StopRequested | None]:
        """The metrics, or the signal that ended the evaluation."""
        try:
            return self._evaluate(iteration), None
        except StopRequested as signal:
            return None, signal

    def _is_due(self, iteration: int, interval: int) -> bool:
        """Whether it is time for what comes every `interval` iterations (0: never), and after the last one."""
        is_last = iteration == self.run.config.train.iterations - 1
        return is_last or (interval > 0 and (iteration + 1) % interval == 0)

    @property
    def _version(self) -> int:
        return self.run.updater.counters.version

    def _pushed(self, report: SyncReport) -> SyncReport:
        self._num_skipped, self._served_version = 0, report.version
        self.run.source.weights_changed(report.version)
        return report

    @contextmanager
    def _phase(self, name: str, iteration: int) -> Iterator[None]:
        started = time.perf_counter()
        with progress.phase(name, iteration):
            yield
        self._seconds[name] = time.perf_counter() - started
        # torch keeps what a phase needed at most
        self._card_bytes = max(self._card_bytes, card_bytes(self.run.policy.compute_device))

    def _cost(self, metrics: Metrics) -> dict[str, float]:
        device, start_metrics, self.start_metrics = self.run.policy.compute_device, self.start_metrics, {}
        return {
            **time_metrics(self._seconds, metrics),
            **start_metrics,
            **gpu_memory(device, self._card_bytes),
            **utilisation(self._flops, self._seconds["train"], device, self.run.ranks.world_size),
        }

    def _log(self, record: Mapping[str, Metrics], iteration: int) -> None:
        for listener in self.run.listeners:  # the whole record to each: a later one may raise
            for name, metrics in record.items():
                listener.log(name, metrics, iteration=iteration)


def _frozen_metric(engines: Deployment) -> dict[str, float]:
    """A mark in every record of engines that do not follow the policy."""
    return {"sync/frozen": 1.0} if engines.is_frozen else {}
