"""The training loop: what every iteration of a run does, in its order.

    (evaluate) -> for each iteration: generate -> train -> sync -> (evaluate) -> (save) -> log

What a signal (SIGINT, SIGTERM, SIGUSR1) does, where a second one ends the process:

    first push, generate          ends it at once; the state after the last complete iteration is saved
    train, sync, save, log        waits until the next sampling or evaluation begins, and ends the run there
    evaluate                      ends it at once; its iteration is recorded, and the resumed run begins with evaluating
    after the last iteration      the run is complete

Several processes have to stop at the same place: for them, "at once" is when the next sampling or evaluation begins.

A run that is killed anywhere repeats what came after its last checkpoint, with the same rollouts, because everything is
a function of seed and iteration, and ends with the same files. (Where not every iteration pushes, a resumed run begins
with a push.) With `rollouts=async`, requests go on between any two steps, a push comes amid them, and which groups are
ready when depends on the clock.

Every process makes all of these steps. What samples, what is gathered, and what the first process does alone is said
where it differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from offline_grpo import progress
from offline_grpo.errors import EngineDied, StopRequested
from offline_grpo.state import Run
from offline_grpo.train.experience import check_groups, check_scored, prepare_batch
from offline_grpo.train.metrics import card_bytes, cost_metrics, rollout_metrics, score_metrics, update_flops
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

    # The engines get version 0, or the checkpoint's, and prove that they serve it, before anything is sampled. Then the
    # source goes on where it was; an asynchronous one begins to ask now.
    with loop.interruptible():
        with progress.phase("sync"):
            loop.push_now()
        run.ranks.gather_results(lambda: [run.source.start(first, None if restored is None else restored.source)])

    # The evaluation before any training, or the one that a stop cut short. Its checkpoint is written again, because it
    # may be the best one now.
    is_due = run.config.eval.eval_first
    if restored is not None:
        is_due = run.ranks.on_main(lambda: run.folder.misses_evaluation(restored))
    if run.evaluator is not None and is_due:
        metrics = loop.evaluate(first - 1)
        run.milestones.see(metrics, first - 1)
        ended = run.milestones.stopped_early_metric(first - 1, run.config.train.iterations)
        loop.log({"eval": {**metrics, **ended}}, first - 1)
        if run.checkpointer is not None and restored is not None:
            run.checkpointer.write(first - 1)
            run.checkpointer.commit(first - 1)

    loop.start_metrics = progress.start_metrics()
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
        self.num_recoveries = 0  # deaths of engines after which these were started again
        self._num_skipped = 0  # iterations since the last push
        self._served_version = 0
        self._seconds: dict[str, float] = {}  # of each phase of this iteration
        self._card_bytes = 0  # the most GPU memory in this iteration

    def iterate(self, iteration: int) -> None:
        run, config = self.run, self.run.config
        self._seconds, self._card_bytes, flops = {}, 0, 0.0
        is_last = iteration == config.train.iterations - 1

        # 1. Every process samples its share of the groups (an asynchronous source hands out those that are ready); then
        #    all have all of them. On a GPU that they share, server and trainer keep their own memory all the time.
        with self._phase("generate", iteration), self.interruptible():
            groups = self.sample(run.training, lambda: check_groups(run.source.next(iteration)))
        groups = [group.with_failures(config.scoring.on_failure) for group in groups]
        run.source.sampled(iteration, groups)

        # 2. Rewards become advantages, and those updates of the policy. Each process takes its share of the sequences
        #    of an update, and the gradients are summed (`Sharding`).
        with self._phase("train", iteration):
            experience = prepare_batch(groups, run.updater.passes, fills_updates=config.data.resample_zero_signal)
            metrics = {**rollout_metrics(groups), **run.source.metrics(), **experience.metrics}
            batch = experience.batch
            for listener in run.listeners:
                listener.rollouts("train", experience.groups, advantages=experience.advantages, iteration=iteration)
            if iteration == 0:
                metrics["num_trainable_parameters"] = float(run.policy.num_trainable)
            if batch is None:  # no group has signal
                metrics["num_updates"] = 0.0
            else:
                metrics["num_tokens_trained"] = float(batch.completion_mask.sum()) * config.train.epochs
                of_epoch = update_flops(run.policy.causal_lm, batch.sequence_lengths)
                flops = None if of_epoch is None else of_epoch * config.train.epochs
                metrics |= run.updater.run(batch, iteration=iteration)

        # 3. When it is time, and before evaluations, the engines get the new weights: each push ends with a proof that
        #    they serve them (`Deployment.push`: stage, deliver, verify). Only the first process pushes to servers.
        evaluates = run.evaluator is not None and (is_last or (iteration + 1) % config.eval.interval == 0)
        with self._phase("sync", iteration):
            metrics |= self.push(force=evaluates)

        # 4. A signal that cuts the evaluation short ends the run once this iteration, which is complete, is on record;
        #    the resumed run begins with the evaluation.
        eval_metrics, signal = None, None
        if evaluates:
            try:
                eval_metrics = self.evaluate(iteration)
            except StopRequested as error:
                signal = error
        # The best state so far is saved, and the one after which `train.stop_when` ends the run.
        is_milestone = eval_metrics is not None and run.milestones.see(eval_metrics, iteration)

        # 5. Write the checkpoint (weights, masters, optimizer, schedule, counters, what the source and the milestones
        #    have seen, the configuration) under a hidden name; then the metrics, which say how long that took. Once
        #    `commit` renames it, it counts: never without its metrics. Seed and iteration make all random numbers.
        interval = config.checkpoint.save_interval
        saves = is_milestone or is_last or (interval > 0 and (iteration + 1) % interval == 0)
        due = run.checkpointer if saves else None
        with self._phase("checkpoint", iteration):
            if due is not None:
                due.write(iteration)
        device, start_metrics, self.start_metrics = run.policy.compute_device, self.start_metrics, {}
        metrics |= run.milestones.stopped_early_metric(iteration, config.train.iterations)
        metrics |= start_metrics | cost_metrics(
            self._seconds,
            metrics,
            flops=flops,
            device=device,
            card_bytes=self._card_bytes,
            num_devices=run.ranks.world_size,
        )
        self.log({"train": metrics} | ({} if eval_metrics is None else {"eval": eval_metrics}), iteration)
        self.num_done = iteration + 1
        if due is not None:
            due.commit(iteration)
            self.num_saved = self.num_done
        if signal is not None:
            raise signal

    def push(self, *, force: bool) -> Metrics:
        """Push if `weight_sync.interval` says so, or `force`: an evaluation wants the newest weights. Returns metrics
        of the push, or of none.
        """
        engines = self.run.training
        self._num_skipped += 1
        report = SyncReport(self._served_version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)
        if force or self._num_skipped >= self.run.plan.weight_sync.interval:
            report = self.push_now()
        frozen = {"sync/frozen": 1.0} if engines.is_frozen else {}  # engines that do not follow the policy
        recovered = {"sync/num_recoveries": float(self.num_recoveries)}
        return {**report.metrics(), **frozen, **engines.metrics(), **recovered}

    def push_now(self) -> SyncReport:
        """Push to the engines of training. With an asynchronous source, amid its requests."""
        run, version = self.run, self.run.updater.counters.version
        push = partial(run.training.push, run.policy, version=version, amid_requests=run.source.samples_ahead)
        report = self.recovering(run.training, push)
        self._note_push(report)
        return report

    def sample(self, engines: Deployment, share: Callable[[], list[RolloutGroup]]) -> list[RolloutGroup]:
        """Each process samples its `share`; all get the groups of all. Raises EngineError if the engines have served
        other weights meanwhile than those of the last push.
        """
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
            is_of_training = engines is self.run.training
            if is_of_training:
                self.run.source.weights_lost()
            report = engines.push(self.run.policy, version=self.run.updater.counters.version, is_recovery=True)
            if is_of_training:
                self._note_push(report)
            return action()

    def _note_push(self, report: SyncReport) -> None:
        # A source that samples ahead may begin further iterations, because newer weights are served.
        self._num_skipped, self._served_version = 0, report.version
        self.run.source.weights_changed(report.version)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a signal ends the run at once. Several processes must stop at the same place: the beginning."""
        ranks, stop = self.run.ranks, self.run.stop
        if (number := ranks.first(stop.number)) is not None:
            raise StopRequested(number)
        with stop.interruptible(allowed=ranks.world_size == 1):
            yield

    def evaluate(self, iteration: int) -> Metrics:
        """Evaluate the newest weights. Training's engines were pushed to just before; separate ones get a push here."""
        run, engines, cycle = self.run, self.run.evaluation, iteration + 1
        evaluator, version = run.evaluator, run.updater.counters.version
        assert evaluator is not None
        with self._phase("eval", iteration), self.interruptible():
            if engines is not run.training:
                self.recovering(engines, lambda: engines.push(run.policy, version=version))
            groups = self.sample(engines, lambda: evaluator.sample(engines.client, cycle=cycle))
            for listener in run.listeners:
                listener.rollouts("eval", groups, advantages=None, iteration=iteration)
            frozen = {"sync/frozen": 1.0} if engines.is_frozen else {}
            return {**evaluator.metrics(groups, cycle=cycle), **score_metrics(groups), **frozen}

    @contextmanager
    def _phase(self, name: str, iteration: int) -> Iterator[None]:
        started = time.perf_counter()
        with progress.phase(name, iteration):
            yield
        self._seconds[name] = time.perf_counter() - started
        # At the end of a phase, because torch's allocator keeps what it has had at most.
        self._card_bytes = max(self._card_bytes, card_bytes(self.run.policy.compute_device))

    def log(self, record: Mapping[str, Metrics], iteration: int) -> None:
        for listener in self.run.listeners:  # the whole record to each: a later one may raise
            for name, metrics in record.items():
                listener.log(name, metrics, iteration=iteration)
