"""Whether completions are scored in processes of their own."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from offline_grpo.interfaces import Task
from offline_grpo.run.task_data import build_task
from offline_grpo.settings import RunConfig


def isolated(
    task: Task,
    config: RunConfig,
    folder: Path | None,
    stack: ExitStack,
    *,
    num_processes: int = 1,
    on_cluster: bool = False,
) -> Task:
    """The task, scored in processes that `stack` ends, or the task itself where it may be scored here.

    Args:
        folder: its file `scoring.log` gets what the code that scores prints; None: that is thrown away.
        num_processes: that share the workers, each with at least one.
        on_cluster: on each machine of the Ray cluster.
    """
    settings = config.scoring
    if settings.workers == 0 or getattr(task, "scores_safely", False):
        return task
    from offline_grpo.generation.scoring.pool import IsolatedTask
    from offline_grpo.generation.scoring.worker import Setup

    setup = Setup(
        make_task=pickle.dumps(partial(build_task, config.task)),
        preload=(build_task.__module__, *getattr(task, "worker_imports", ())),
        num_workers=-(-settings.workers // num_processes),
        timeout_s=settings.timeout_s,
        memory_bytes=settings.memory_mib * 2**20,
        printed=None if folder is None else folder.absolute() / "scoring.log",
    )
    if on_cluster:
        from offline_grpo.generation.scoring.cluster import ClusterScorers

        assert config.placement.address is not None
        scorers = ClusterScorers(config.placement.address, config.placement.ray_init, setup)
    else:
        from offline_grpo.generation.scoring.pool import Scorers

        scorers = Scorers(setup)
    isolated_task = IsolatedTask(task, scorers, settings)
    stack.callback(isolated_task.close)
    return isolated_task
