"""Serves the policy: the engines of a run, and one strategy that keeps their weights current."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from offline_grpo.engine.engine import Engine, ServerEngine
from offline_grpo.engine.server import next_to_start
from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.generation.spread import SpreadClient
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.types import Metrics, ServedWeights, SyncReport
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.requirements import check_requirements
from offline_grpo.weight_sync.snapshot import FullWeights, Snapshot
from offline_grpo.weight_sync.strategy import WeightSync

log = logging.getLogger(__name__)


Start = tuple[str, Mapping[str, Any]]
"""The words with which an engine is started: the model, and arguments of the command line."""


@dataclass(frozen=True)
class DeploymentState:
    """What other processes need to use the engines that the first one started, of each: the served weights, where the
    server is, its pid, and whether it may be asked."""

    weights: tuple[ServedWeights, ...]
    urls: tuple[str | None, ...]
    pids: tuple[int | None, ...]
    serves: tuple[bool, ...]


class Deployment:
    """Implements `interfaces.Deployment`: a push stages the weights once, and gives them to all engines at once.

    Of several engines, one that dies is left out, and the run goes on with the others. The next push begins to start it
    again, and the first one that finds it ready gives it the weights and proves them: then it is asked again. With none
    left, or one that dies while it starts, `recover` starts what is missing and waits for it.

    Args:
        engines: all serve the same weights. Several are servers.
        full_weights: the one place where a push reads the policy's weights from.
    """

    def __init__(self, engines: Sequence[Engine], weight_sync: WeightSync, full_weights: FullWeights) -> None:
        assert len(engines) == 1 or not weight_sync.requires.one_engine, f"{weight_sync.name} serves one engine"
        self.engines = list(engines)
        self._spread = SpreadClient([engine.client for engine in engines]) if len(engines) > 1 else None  # type: ignore[misc]  # servers
        self._starting: dict[Engine, Start] = {}
        self._num_restarts = 0
        self._strategy = weight_sync
        self._full_weights = full_weights
        self._version: int | None = None

    @property
    def client(self) -> RolloutClient:
        """Samples from all engines that serve."""
        return self.engines[0].client if self._spread is None else self._spread

    @property
    def is_frozen(self) -> bool:
        """See `Deployment.is_frozen` in interfaces.py."""
        return self._strategy.requires.moves == "nothing"

    def connect(self, policy: Policy) -> None:
        """Start or find the engines, and prepare the path to their weights. Called once, before masters and optimizer
        exist.

        Raises:
            ConfigError: a client or a policy that the strategy is not for, or an engine that it cannot work with.
            EngineError: an engine cannot be started or reached.
        """
        strategy = self._strategy
        for engine in self.engines:
            check_requirements(
                strategy.name,
                strategy.requires,
                type(engine.client),
                lora_rank=policy.lora_rank,
                base_url=engine.found_at,
            )
        snapshot = self._snapshot(policy)
        words = strategy.start_model(snapshot), strategy.start_args(snapshot)
        for engine in next_to_start(self.engines):
            engine.begin(*words)
        for engine in self.engines:
            engine.start(*words)
            strategy.attach(engine, snapshot)

    def push(self, policy: Policy, *, version: int, amid_requests: bool = False) -> SyncReport:
        """See `Deployment.push` in interfaces.py.

        Raises:
            EngineDied: a server that the run started has ended; `recover` starts it again.
            EngineError: the weights did not arrive.
        """
        num_alive = len(self._alive)
        try:
            return self._push(policy, version, amid_requests)
        except EngineDied as death:
            if self._restarts or not 0 < len(self._alive) < num_alive:
                raise
            log.warning("%s The push goes on without it.", death)
        return self.push(policy, version=version, amid_requests=amid_requests)

    def check_served(self) -> None:
        """See `Deployment.check_served` in interfaces.py."""
        assert self._version is not None, "check_served() before push()"
        for engine in (
            self._serving
        ):  # the dead had what was proven by the last push, and nobody else has the key of their servers
            try:
                self._strategy.check_served(engine, self._version)
            except EngineDied as death:
                if engine in self._alive or not self._alive:
                    raise
                log.warning("%s The run goes on without it.", death)

    def recover(self, policy: Policy, *, version: int) -> SyncReport:
        """Restart the engines that have died, and push to all. Raises as `connect` and `push` do."""
        snapshot = self._snapshot(policy)
        lost = [engine for engine in self.engines if engine in self._starting or engine.has_lost_weights]
        words = {engine: self._recovery_words(snapshot) for engine in lost}
        for engine in lost:
            if engine not in self._starting:
                engine.stop()
        for engine in next_to_start([engine for engine in lost if engine not in self._starting], self._starting):
            engine.begin(*words[engine])
        self._starting = {}
        for engine in lost:
            engine.start(*words[engine])
            self._strategy.reattach(engine, snapshot)
        return self.push(policy, version=version)

    def metrics(self) -> Metrics:
        """See `Deployment.metrics` in interfaces.py."""
        return (
            {}
            if self._spread is None
            else {**self._spread.metrics(), "engines/num_restarts": float(self._num_restarts)}
        )

    def close(self) -> None:
        """Release all engines, and stop those that the run started. Called once, also if `connect` never ran."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.stop)
                stack.callback(self._strategy.detach, engine)
            if self._spread is not None:
                stack.callback(self._spread.close)

    @property
    def state(self) -> DeploymentState:
        """For the other processes of a run, see `follow`."""
        servers = [engine.server if isinstance(engine, ServerEngine) else None for engine in self.engines]
        serving = self._serving
        return DeploymentState(
            weights=tuple(engine.client.weights for engine in self.engines),
            urls=tuple(server.base_url if server is not None else None for server in servers),
            pids=tuple(server.pid if server is not None else None for server in servers),
            serves=tuple(engine in serving for engine in self.engines),
        )

    def follow(self, state: DeploymentState) -> None:
        """Sample from engines that another process of the run started and pushed to."""
        for engine, weights, url, pid in zip(self.engines, state.weights, state.urls, state.pids, strict=True):
            engine.client.weights = weights
            if isinstance(engine, ServerEngine) and url is not None:
                engine.follow(url, pid)
        self._ask([engine for engine, serves in zip(self.engines, state.serves, strict=True) if serves])

    @property
    def _restarts(self) -> bool:
        """Whether a push starts every server anew, the dead among them."""
        return self._strategy.requires.own_server

    @property
    def _alive(self) -> list[Engine]:
        """All but the dead and those that are being started."""
        return [
            e for e in self.engines if e not in self._starting and (e.found_at is not None or not e.has_lost_weights)
        ]

    @property
    def _serving(self) -> list[Engine]:
        """Those that are alive; where that is none, all, so that the dead say why."""
        return self._alive or self.engines

    def _push(self, policy: Policy, version: int, amid_requests: bool) -> SyncReport:
        started = time.perf_counter()
        self._bring_back(policy)
        snapshot, serving = self._snapshot(policy), self.engines if self._restarts else self._serving
        try:
            with self._strategy.staged(snapshot, version) as staged:
                replaces = (
                    {engine: self._version for engine in serving if self._is_asked(engine)}
                    if amid_requests and self._version is not None
                    else {}
                )
                paused_seconds = self._strategy.deliver(serving, replace(staged, replaces=replaces))
                for engine in serving:
                    engine.client.weights = ServedWeights(staged.version, staged.name)
            self._version = staged.version
            delivered = time.perf_counter()
            proofs = self._strategy.verify(serving, snapshot, version)
        except EngineError:
            self._check_alive()  # if the first engine died, others fail too: what was staged lay in its folder
            raise
        self._ask(serving)
        return SyncReport(
            version=staged.version,
            num_tensors=staged.num_tensors,
            num_bytes=staged.num_bytes,
            seconds=delivered - started,
            paused_seconds=paused_seconds,
            proof_seconds=time.perf_counter() - delivered,
            alignment=worst(proofs),
        )

    def _ask(self, engines: Sequence[Engine]) -> None:
        """From now on `client` samples from these."""
        if self._spread is not None:
            self._spread.serve_from([engine.client for engine in engines])  # type: ignore[misc]  # servers
            self._spread.weights = engines[0].client.weights

    def _is_asked(self, engine: Engine) -> bool:
        return self._spread is None or engine.client in self._spread.serving

    def _bring_back(self, policy: Policy) -> None:
        """Start the dead again, beside the others, and prepare the path to those that are ready by now."""
        if self._restarts:
            return
        snapshot = self._snapshot(policy)
        for engine in [engine for engine in self._starting if engine.is_ready]:
            engine.start(*self._starting.pop(engine))
            self._strategy.reattach(engine, snapshot)
        serving = self._serving
        dead = [engine for engine in self.engines if engine not in serving and engine not in self._starting]
        if (
            dead and self._spread is not None
        ):  # who samples meanwhile would take a process that only starts for one that serves
            self._spread.leave_out([engine.client for engine in dead])  # type: ignore[misc]  # servers
        for engine in next_to_start(dead, self._starting):
            self._num_restarts += 1
            log.info(
                "starting the server again that has ended; %d go%s on meanwhile",
                len(serving),
                "es" if len(serving) == 1 else "",
            )
            self._strategy.detach(engine)
            engine.stop()
            self._starting[engine] = self._recovery_words(snapshot)
            engine.begin(*self._starting[engine])

    def _recovery_words(self, snapshot: Snapshot) -> Start:
        return self._strategy.recovery_model(snapshot), self._strategy.start_args(snapshot)

    def _snapshot(self, policy: Policy) -> Snapshot:
        return Snapshot(policy, self._full_weights, host=self._serving[0])

    def _check_alive(self) -> None:
        for engine in self.engines:
            engine.check_alive()


def worst(proofs: Sequence[Proof]) -> Mapping[str, float]:
    """The metrics of the engine that is furthest from the policy; none where nothing was compared."""
    return max(proofs, key=lambda proof: proof.diff_abs_mean).metrics() if proofs else {}
