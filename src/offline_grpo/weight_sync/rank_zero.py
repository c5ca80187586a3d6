"""Runs weight sync on rank 0 and broadcasts the outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.policy import Policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import Metrics, SyncReport
from offline_grpo.weight_sync.deployment import Deployment


class RankZeroDeployment:
    """The `Deployment` of a run with several processes, each of which has an `inner` of its own around the same
    servers.

    Rank 0's inner deployment alone starts servers and pushes; those of the others follow. An error on rank 0 is raised
    on all.

    Args:
        lead: see `Sharding.lead`.
    """

    def __init__(self, inner: Deployment, ranks: Ranks, lead: Callable[[Callable[[], Any]], Any]) -> None:
        self._inner = inner
        self._ranks = ranks
        self._lead = lead

    @property
    def client(self) -> RolloutClient:
        """This process's own."""
        return self._inner.client

    @property
    def is_frozen(self) -> bool:
        """See `Deployment.is_frozen`."""
        return self._inner.is_frozen

    def connect(self, policy: Policy) -> None:
        """See `Deployment.connect`."""
        self._lead(lambda: self._inner.connect(policy))
        self._follow()

    def push(self, policy: Policy, *, version: int, amid_requests: bool = False) -> SyncReport:
        """See `Deployment.push`. Every process's client then asks for the same weights."""
        report = self._lead(lambda: self._inner.push(policy, version=version, amid_requests=amid_requests))
        self._follow()
        return report

    def check_served(self) -> None:
        """See `Deployment.check_served`."""
        self._ranks.on_main(self._inner.check_served)

    def recover(self, policy: Policy, *, version: int) -> SyncReport:
        """See `Deployment.recover`."""
        report = self._lead(lambda: self._inner.recover(policy, version=version))
        self._follow()
        return report

    def metrics(self) -> Metrics:
        """See `Deployment.metrics`. What this process has sampled."""
        return self._inner.metrics()

    def close(self) -> None:
        """See `Deployment.close`. Uses no collectives: processes may end at different times."""
        self._inner.close()

    def _follow(self) -> None:
        state = self._ranks.broadcast(self._inner.state)
        if not self._ranks.is_main:
            self._inner.follow(state)
