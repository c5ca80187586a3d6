"""What a push delivers: the policy's weights as they are, and the tag that they leave in a server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from torch import Tensor

from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints
from offline_grpo.model.policy import Policy

FullWeights = Callable[[Policy], Iterator[tuple[str, Tensor]]]
"""The whole of each parameter of a policy, by its name in the checkpoint, one after the other. See `Sharding.full_weights`."""


@dataclass(frozen=True)
class Snapshot:
    """The policy's weights as they are now, read through one place.

    Args:
        host: the first engine; what all engines read lies in its server's folders, and is deleted with them.
    """

    policy: Policy
    full_weights: FullWeights
    host: Any

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `FullWeights`."""
        return self.full_weights(self.policy)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """64 bits for each parameter, by name."""
        named = dict(self.weights())
        return dict(zip(named, fingerprints(list(named.values())), strict=True))


@cache
def this_run() -> str:
    """A name for this process among all that may push weights to a server."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def weights_tag(version: int) -> str:
    """What a push leaves in a server: the version of the weights, and whose they are."""
    return f"{version} of run {this_run()}"
