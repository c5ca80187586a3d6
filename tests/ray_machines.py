"""A Ray cluster on this machine, of several things that Ray takes for machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

QUICKLY = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
"""How soon Ray sees that a machine is lost."""


@contextmanager
def machines(count: int) -> Iterator[Any]:
    """A machine without CPU cores, and `count` with one each, in the attribute `machines`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": QUICKLY}
        )
        try:
            cluster.machines = [cluster.add_node(num_cpus=1) for _ in range(count)]
            yield cluster
        finally:
            cluster.shutdown()
