"""With several training processes, the first one alone moves weights: all have the same. The others learn what it did."""

from __future__ import annotations

from typing import Any

from offline_grpo.interfaces import RolloutClient, WeightSync
from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import SyncReport


class MainOnly:
    """Wraps the strategy of a run with several processes. An error of the first process is raised on all."""

    def __init__(self, inner: WeightSync, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks
        self._client: Any = None

    @property
    def shares_weights(self) -> bool:
        """The first process's parameters may be the engine's; those of the others are their own."""
        return self._inner.shares_weights and self._ranks.is_main

    @property
    def interval(self) -> int:
        return self._inner.interval

    def check(self, client_class: type, *, lora_rank: int | None) -> None:
        """See `WeightSync.check`."""
        self._inner.check(client_class, lora_rank=lora_rank)

    def connect(self, policy: Any, client: RolloutClient) -> None:
        """See `WeightSync.connect`."""
        self._client = client
        self._ranks.on_main(lambda: self._inner.connect(policy, client))
        self._tell_clients()

    def push(self, policy: Any, *, version: int) -> SyncReport:
        """See `WeightSync.push`. Every process's client then asks for the same weights."""
        report = self._ranks.on_main(lambda: self._inner.push(policy, version=version))
        self._tell_clients()
        return report

    def check_served(self) -> None:
        """See `WeightSync.check_served`."""
        self._ranks.on_main(self._inner.check_served)

    def recover(self, policy: Any, *, version: int) -> None:
        """See `WeightSync.recover`."""
        self._ranks.on_main(lambda: self._inner.recover(policy, version=version))
        self._tell_clients()

    def close(self) -> None:
        """See `WeightSync.close`."""
        self._inner.close()

    def _tell_clients(self) -> None:
        self._client.weights, server_pid = self._ranks.broadcast((self._client.weights, self._client.server.pid))
        if not self._ranks.is_main:
            self._client.server.watch(server_pid)
