"""Serves the policy: the engines of a run, and one strategy that keeps their weights current."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from offline_grpo.engine.engine import Engine, ServerEngine
from offline_grpo.errors import EngineError
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.types import ServedWeights, SyncReport
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.requirements import check_requirements
from offline_grpo.weight_sync.snapshot import FullWeights, Snapshot
from offline_grpo.weight_sync.strategy import SharingSync, WeightSync

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeploymentState:
    """What other processes need to use the engines that the first one started: of each, the served weights and the server's pid."""

    weights: tuple[ServedWeights, ...]
    pids: tuple[int | None, ...]


class Deployment:
    """Implements `interfaces.Deployment`: a push stages the weights once, and gives them to every engine in turn.

    Args:
        engines: the run samples from the first; all serve the same weights.
        full_weights: the one place where a push reads the policy's weights from.
    """

    def __init__(self, engines: Sequence[Engine], weight_sync: WeightSync, full_weights: FullWeights) -> None:
        assert len(engines) == 1 or not weight_sync.requires.one_engine, f"{weight_sync.name} serves one engine"
        self.engines = list(engines)
        self._strategy = weight_sync
        self._full_weights = full_weights
        self._version: int | None = None

    @property
    def client(self) -> RolloutClient:
        """Samples from the first engine."""
        return self.engines[0].client

    @property
    def is_frozen(self) -> bool:
        """See `Deployment.is_frozen` in interfaces.py."""
        return self._strategy.requires.moves == "nothing"

    def connect(self, policy: Policy) -> None:
        """Start or find the engines, and prepare the path to their weights. Called once, before masters and optimizer exist.

        Raises:
            ConfigError: a client or a policy that the strategy is not for, or an engine that it cannot work with.
            EngineError: an engine cannot be started or reached.
        """
        strategy = self._strategy
        for engine in self.engines:
            check_requirements(strategy.name, strategy.requires, type(engine.client), lora_rank=policy.lora_rank, base_url=engine.found_at)
        snapshot = self._snapshot(policy)
        for engine in self.engines:
            engine.start(strategy.start_model(snapshot), strategy.start_args(snapshot))
            strategy.attach(engine, snapshot)

    def push(self, policy: Policy, *, version: int) -> SyncReport:
        """See `Deployment.push` in interfaces.py.

        Raises:
            EngineDied: a server that the run started has ended; `recover` starts it again.
            EngineError: the weights did not arrive.
        """
        started = time.perf_counter()
        snapshot = self._snapshot(policy)
        try:
            with self._strategy.staged(snapshot, version) as staged:
                paused_seconds = 0.0
                for engine in self.engines:
                    paused_seconds = max(paused_seconds, self._strategy.apply(engine, staged))
                    engine.client.weights = ServedWeights(staged.version, staged.name)
            self._version = staged.version
            delivered = time.perf_counter()
            proofs = [self._strategy.verify(engine, snapshot, version) for engine in self.engines]
        except EngineError:
            self._check_alive()  # if the first engine died, others fail too: what was staged lay in its folder
            raise
        return SyncReport(
            version=staged.version,
            num_tensors=staged.num_tensors,
            num_bytes=staged.num_bytes,
            seconds=delivered - started,
            paused_seconds=paused_seconds,
            proof_seconds=time.perf_counter() - delivered,
            alignment=worst([proof for proof in proofs if proof is not None]),
        )

    def check_served(self) -> None:
        """See `Deployment.check_served` in interfaces.py."""
        assert self._version is not None, "check_served() before push()"
        for engine in self.engines:
            self._strategy.check_served(engine, self._version)

    def mend(self, policy: Policy) -> list[str]:
        """See `Deployment.mend` in interfaces.py."""
        if not isinstance(self._strategy, SharingSync):
            return []
        return self._strategy.mend(self.engines[0], self._snapshot(policy))

    def recover(self, policy: Policy, *, version: int) -> None:
        """Restart the engines that have died, mend the weights, and push to all. Raises as `connect` and `push` do."""
        snapshot = self._snapshot(policy)
        for engine in self.engines:
            if engine.has_lost_weights:
                engine.stop()
                model = self._strategy.recovery_model(snapshot)
                engine.start(model, self._strategy.start_args(snapshot))
                self._strategy.reattach(engine, snapshot)
        self.mend(policy)
        self.push(policy, version=version)

    def close(self) -> None:
        """Release all engines, and stop those that the run started. Called once at exit, also if `connect` never ran."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.stop)
                stack.callback(self._strategy.detach, engine)

    @property
    def state(self) -> DeploymentState:
        """For the other processes of a run, see `follow`."""
        pids = tuple(engine.server.pid if isinstance(engine, ServerEngine) else None for engine in self.engines)
        return DeploymentState(tuple(engine.client.weights for engine in self.engines), pids)

    def follow(self, state: DeploymentState) -> None:
        """Sample from engines that another process of the run started and pushed to."""
        for engine, weights, pid in zip(self.engines, state.weights, state.pids, strict=True):
            engine.client.weights = weights
            if isinstance(engine, ServerEngine):
                engine.server.watch(pid)

    def _snapshot(self, policy: Policy) -> Snapshot:
        return Snapshot(policy, self._full_weights, host=self.engines[0])

    def _check_alive(self) -> None:
        for engine in self.engines:
            engine.check_alive()


def worst(proofs: Sequence[Proof]) -> Mapping[str, float]:
    """The metrics of the engine that is furthest from the policy; none where nothing was compared."""
    return max(proofs, key=lambda proof: proof.diff_abs_mean).metrics() if proofs else {}
