"""When the engine gets new weights, and which ones it serves in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offline_grpo.interfaces import Deployment
from offline_grpo.model.policy import Policy
from offline_grpo.train.counters import PushCounters


@dataclass
class PushSchedule:
    """Counts the opportunities to push, of which every `interval`-th is taken.

    With an interval above 1 the engine serves older weights than the trainer has. A copy of them is kept in host memory
    then: an engine that is started again, after its death or with a resumed run, must go on with just those, or the
        run would not be the same.
    """

    interval: int
    version: int = field(default=0, init=False)
    _num_skipped: int = field(default=0, init=False)
    _served: dict[str, Tensor] | None = field(default=None, init=False)  # trained parameters, where interval > 1

    def is_due(self, *, force: bool) -> bool:
        """Whether to push at this opportunity; `force` where the engine must not be older than the trainer."""
        self._num_skipped += 1
        return force or self._num_skipped >= self.interval

    def pushed(self, policy: Policy, version: int) -> None:
        """The engine serves the policy as it is now."""
        self._num_skipped = 0
        self._remember(policy, version)

    def connected(self, policy: Policy, version: int) -> None:
        """The run begins: the engine serves the policy as it is now, or, if a checkpoint said so, what it served then."""
        if self._served is None:
            self._remember(policy, version)

    def _remember(self, policy: Policy, version: int) -> None:
        self.version = version
        weights = policy.trained_parameters().items() if self.interval > 1 else ()
        self._served = {
            name: (p.detach().clone() if policy.is_sharded else p.detach().to("cpu", copy=True)) for name, p in weights
        } or None

    @contextmanager
    def served_weights(self, policy: Policy, version: int) -> Iterator[int]:
        """Inside, the policy has the weights that the engine serves, or must serve again; yields their version.

        Args:
            version: of the policy's own weights.
        """
        if self._served is None or self.version == version:
            yield version
            return
        own = {name: p.detach().clone() for name, p in policy.trained_parameters().items()}
        _write(policy, self._served)
        try:
            yield self.version
        finally:
            _write(policy, own)

    def state_dict(self, version: int) -> tuple[PushCounters, Mapping[str, Tensor]]:
        """Counters, and the served weights where they are older than the policy's, of `version`."""
        is_older = self._served is not None and self.version != version
        return PushCounters(self.version, self._num_skipped), self._served or {} if is_older else {}

    def load_state_dict(self, counters: PushCounters, served: Mapping[str, Tensor]) -> None:
        """Restore `state_dict()`."""
        self.version, self._num_skipped = counters.version, counters.num_skipped
        self._served = dict(served) or None


def frozen_metric(deployment: Deployment) -> dict[str, float]:
    """What tells, in every record, that these engines do not follow the policy."""
    return {"sync/frozen": 1.0} if deployment.is_frozen else {}


@torch.no_grad()
def _write(policy: Policy, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in policy.trained_parameters().items():
        parameter.copy_(weights[name])
