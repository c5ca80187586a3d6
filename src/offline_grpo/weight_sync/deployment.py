"""Serves the policy: the engines of a run, and one strategy that keeps their weights current."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

from offline_grpo.engine.engine import Engine, next_to_start
from offline_grpo.engine.streaming import SpreadClient
from offline_grpo.errors import EngineError
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import Metrics, ServedWeights, SyncReport
from offline_grpo.weight_sync.snapshot import FullWeights, Snapshot
from offline_grpo.weight_sync.strategy import WeightSync

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def led(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a method of `Deployment`: rank 0 alone runs it, and the others copy its engines' state afterwards."""

    @functools.wraps(method)
    def on_all(*args: P.args, **kwargs: P.kwargs) -> T:
        deployment: Any = args[0]
        ranks, spread, engines = deployment._ranks, deployment._spread, deployment.engines
        result = deployment._lead(lambda: method(*args, **kwargs))

        # The servers may have moved, and have other weights.
        if ranks is not None:
            state = ranks.broadcast([(engine.weights, engine.base_url, engine.pid) for engine in engines])
            if not ranks.is_main:
                for engine, (weights, url, pid) in zip(engines, state, strict=True):
                    engine.weights = weights
                    engine.follow(url, pid)

        # From now on requests go to every engine.
        if spread is not None:
            spread.serving, spread.weights = list(engines), engines[0].weights
        return result

    return on_all


class Deployment:
    """A push stages the weights once, gives them to all engines at once, and verifies each.

    Of several engines, one that dies is left out, and sampling continues with the others. The next push starts it again
    before it gives the weights to all.

    Of several processes each has a deployment around the same servers. Rank 0 alone starts servers and pushes; the
    others follow. An error on rank 0 is raised on all. `metrics` are about what this process has sampled, and `close`
    uses no collectives: processes may end at different times.

    Args:
        engines: all serve the same weights. Several are servers.
        full_weights: the one place where a push reads the policy's weights from.
        leads: the processes, and `Sharding.lead`; None where this process is alone, or samples from its own policy.

    Attributes:
        client: samples from all engines that serve.
        is_frozen: the engine keeps its own weights (weight_sync=none).
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        weight_sync: WeightSync,
        full_weights: FullWeights,
        leads: tuple[Ranks, Callable[[Callable[[], Any]], Any]] | None = None,
    ) -> None:
        assert len(engines) == 1 or not weight_sync.requires.one_engine, f"{weight_sync.name} serves one engine"
        self.engines: list[Any] = list(engines)  # of several each is a `ServerEngine`
        self._spread = SpreadClient(self.engines) if len(engines) > 1 else None
        self.client: RolloutClient = self._spread or self.engines[0]
        self.is_frozen = weight_sync.requires.moves == "nothing"
        self._num_restarts = 0
        self._strategy = weight_sync
        self._full_weights = full_weights
        self._ranks, self._lead = leads or (None, lambda action: action())
        self._version: int | None = None

    @led
    def connect(self, policy: Policy) -> None:
        """Start the engines, or wait for those that have begun, and open the way of the weights to them."""
        snapshot = self._snapshot(policy)
        words = self._strategy.start_words(snapshot, is_recovery=False)
        self._start(self.engines, words, snapshot)

    @led
    def push(
        self, policy: Policy, *, version: int, amid_requests: bool = False, is_recovery: bool = False
    ) -> SyncReport:
        """Have the engines serve the policy's weights, and prove that they do. Every process's client then asks for
        them.

        Args:
            version: number of updates in the weights.
            amid_requests: requests of this run are open, so what others have loaded must be noticed before it is gone.
            is_recovery: start all engines again that have lost their weights; else those of several that have ended.

        Raises:
            EngineDied: an engine has ended. EngineError: it serves something else, or refuses.
        """
        # 1. The engines to start again. A strategy with servers of its own restarts them itself, in every push.
        lost: list[Engine] = []
        if is_recovery:
            lost = [engine for engine in self.engines if engine.has_lost_weights]
        elif self._spread is not None and not self._strategy.requires.own_server:
            lost = [engine for engine in self.engines if engine not in self._serving]
            self._num_restarts += len(lost)

        # 2. These start again. Requests go to the others meanwhile.
        if lost:
            if self._spread is not None:
                self._spread.serving = [client for client in self._spread.serving if client not in {*lost}]
            before = self._snapshot(policy)
            words = self._strategy.start_words(before, is_recovery=True)
            for engine in lost:
                engine.stop()
            self._start(lost, words, before)

        # 3. The weights are staged once, as they are now.
        started, snapshot = time.perf_counter(), self._snapshot(policy)
        asked = [e for e in self.engines if self._spread is None or e in self._spread.serving]
        try:
            with self._strategy.staged(snapshot, version) as staged:
                # What others have loaded must be noticed before the push overwrites it.
                if amid_requests and self._version is not None:
                    for engine in asked:
                        self._strategy.check_served(engine, self._version)

                # 4. All engines get them; from now on requests ask for these.
                paused_seconds = self._strategy.deliver(self.engines, staged)
                for engine in self.engines:
                    engine.weights = ServedWeights(staged.version, staged.name)
            self._version = staged.version
            delivered = time.perf_counter()

            # 5. Each proves that it serves them; the report has the proof of the worst.
            proofs = self._strategy.verify(self.engines, snapshot, version)
        except EngineError:
            for engine in self.engines:  # if the first one died, others fail too: what was staged lay in its folder
                engine.check_alive()
            raise
        worst = max(proofs, key=lambda proof: proof.diff_abs_mean, default=None)
        return SyncReport(
            version=staged.version,
            num_tensors=staged.num_tensors,
            num_bytes=staged.num_bytes,
            seconds=delivered - started,
            paused_seconds=paused_seconds,
            proof_seconds=time.perf_counter() - delivered,
            alignment={} if worst is None else worst.metrics(),
        )

    def check_served(self) -> None:
        """See that what was sampled had the weights of the last push, also from engines that have died since."""

        def check() -> None:
            assert self._version is not None, "check_served() before push()"
            for engine in self._serving:
                self._strategy.check_served(engine, self._version)

        check() if self._ranks is None else self._ranks.on_main(check)

    def metrics(self) -> Metrics:
        """Of several engines, for the iteration's metrics file."""
        if self._spread is None:
            return {}
        return {**self._spread.metrics(), "engines/num_restarts": float(self._num_restarts)}

    def close(self) -> None:
        """Leave the engines behind, and end those that the run has started."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.stop)
                stack.callback(self._strategy.detach, engine)
            if self._spread is not None:
                stack.callback(self._spread.close)

    @property
    def _serving(self) -> list[Engine]:
        """All but servers of the run that have ended; where that is none, all, so that the dead say why."""
        return [e for e in self.engines if not (e.is_managed and e.has_lost_weights)] or self.engines

    def _start(self, engines: Sequence[Engine], words: tuple[str, Mapping[str, object]], snapshot: Snapshot) -> None:
        """Start engines, those at once that share no GPU, and open the way of the weights to each."""
        for engine in next_to_start(engines):
            engine.begin(*words)
        for engine in engines:
            engine.start(*words)
            if not self.is_frozen:
                engine.check_logprobs()
            self._strategy.attach(engine, snapshot)

    def _snapshot(self, policy: Policy) -> Snapshot:
        return Snapshot(policy, self._full_weights, host=self.engines[0])
