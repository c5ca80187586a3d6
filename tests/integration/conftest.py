"""Whole runs in this process draw no report, which takes longer than the rest of them. Commands do, and children that
are asked to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from runs import CLUSTER_OF, draw_nothing

from offline_grpo.report import plots

QUICKLY = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
"""How soon Ray sees that a machine is lost."""


@pytest.fixture(autouse=True, scope="module")
def no_drawing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_report", draw_nothing)
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray on this machine, which takes it for a head without CPU cores and two machines with one each, for the tests of
    `ON_RAY`. One that loses a machine adds another.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CLUSTER_OF, str(os.getpid()))  # which all its processes inherit
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICKLY}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
            yield cluster
        finally:
            cluster.shutdown()
