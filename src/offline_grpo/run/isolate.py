"""Whether completions are scored in processes of their own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offline_grpo.interfaces import Task
from offline_grpo.run.preflight import Plan
from offline_grpo.run.task_data import build_task
from offline_grpo.settings import PlacementConfig, RunConfig

if TYPE_CHECKING:
    from offline_grpo.generation.scoring.isolated import Asked
    from offline_grpo.generation.scoring.messages import Setup
    from offline_grpo.placement.ranks import Ranks


def isolated(
    task: Task,
    config: RunConfig,
    folder: Path | None,
    stack: ExitStack,
    *,
    num_processes: int = 1,
    on_cluster: bool = False,
) -> Task:
    """The task, scored below a process that starts now, or the task itself where it may be scored here.

    Args:
        folder: its file `scoring.log` gets what the code that scores prints; None: that is thrown away.
        stack: ends the processes.
        num_processes: that share the workers, each with at least one.
        on_cluster: below such a process on each machine of the Ray cluster instead.
    """
    settings = config.scoring
    if settings.workers == 0 or getattr(task, "scores_safely", False):
        return task
    from offline_grpo.generation.scoring.isolated import IsolatedTask
    from offline_grpo.generation.scoring.messages import Setup

    own = replace(settings, workers=-(-settings.workers // num_processes))
    preload = (build_task.__module__, *getattr(task, "worker_imports", ()))
    printed = None if folder is None else folder.absolute() / "scoring.log"
    setup = Setup.of(partial(build_task, config.task), own, preload=preload, printed=printed)
    isolated_task = IsolatedTask(task, _scorers(setup, config.placement if on_cluster else None), settings)
    stack.callback(isolated_task.close)
    return isolated_task


def _scorers(setup: Setup, cluster: PlacementConfig | None) -> Asked:
    if cluster is None:
        from offline_grpo.generation.scoring.scorers import Scorers

        return Scorers(setup)
    from offline_grpo.generation.scoring.cluster import ClusterScorers

    assert cluster.address is not None
    return ClusterScorers(cluster.address, cluster.ray_init, setup)


def with_scorers(plan: Plan, folder: Path, stack: ExitStack, ranks: Ranks) -> Plan:
    """The plan with a task that scores where it may: see `isolated`."""
    on_cluster = plan.config.placement.score_on_cluster
    task = isolated(plan.data.task, plan.config, folder, stack, num_processes=ranks.world_size, on_cluster=on_cluster)
    return replace(plan, data=replace(plan.data, task=task))
