"""A run's problems: those that it trains on, those that it evaluates on, and where completions of them are scored."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from offline_grpo.config.build import build, check_signature, resolve
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Task, TaskFacts
from offline_grpo.settings import RunConfig
from offline_grpo.task.mixture import of_task
from offline_grpo.task.problems import MANY, NearDuplicate, near_duplicates, prompt_key
from offline_grpo.types import Problem, RolloutGroup, Split

SOURCE_RUNTIME = (
    *("client", "task", "problems", "codec", "vocab_size", "context", "sampling", "run_folder", "model_id", "origin"),
    *("advantage", "on_failure", "rank", "world_size", "trainer_version", "updates_per_iteration", "num_iterations"),
)
"""Names under which a rollout source's constructor may ask for objects that exist only once the model is loaded."""

PREFIX = "assistant_prefix"
"""In the group `task`; the run acts on it, whatever the task."""
MAX_PROBLEMS = 1_000_000
ENDLESS_TASK_PROBLEMS = 10_000
"""What `data.num_train_seeds: null` means for a task that makes problems from seeds without end."""
EVAL_PROBLEMS = 256
"""What `eval.num_ids: null` means for a task that has more: enough for intervals of a few per cent."""


@dataclass(frozen=True)
class TaskData:
    """A task and its problems; `train` is None where the rollout source needs none."""

    task: Task
    train: Sequence[Problem] | None
    held_out: Sequence[Problem]
    num_dropped: int = 0  # training problems left out, because their prompts are held out
    recorded: Sequence[RolloutGroup] = ()  # see `Source.recorded`

    @cached_property
    def near_duplicates(self) -> Sequence[NearDuplicate]:
        """Takes up to a second, which neither a refused start nor a further process should."""
        return near_duplicates(self.train or (), self.held_out)


def build_task(node: Any) -> Task:
    """The task of a node; the nodes under `tasks`, which a mixture has, are built first."""
    node = {name: value for name, value in node.items() if name != PREFIX} if isinstance(node, Mapping) else node
    tasks = node.get("tasks") if isinstance(node, Mapping) else None
    if not isinstance(tasks, Mapping):
        return build(node, key="task", protocol=Task)
    built = {}
    for name, each in tasks.items():
        own = each.get(PREFIX) if isinstance(each, Mapping) else None
        if own is not None:
            fix = f"a mixture has one for all of its tasks; set task.{PREFIX}"
            raise ConfigError(f"task.tasks.{name}.{PREFIX}", own, fix)
        with of_task(name):
            built[name] = build_task(each)
    return build({**node, "tasks": built}, key="task", protocol=Task)


def task_data(config: RunConfig) -> TaskData:
    """The task and its problems. Raises ConfigError for settings of either or of the source of rollouts."""
    # The source's settings fit its signature; what it asks for at run time, it will get.
    source = resolve(config.rollouts, "rollouts")
    if not isinstance(records(config), bool):
        raise ConfigError("rollouts.record", records(config), "must be true or false")
    settings = {name: value for name, value in source_node(config).items() if name != "_target_"}
    runtime = [name for name in SOURCE_RUNTIME if name != "problems" or source.needs_problems]
    check_signature(source, settings, "rollouts", given_at_runtime=dict.fromkeys(runtime))
    source.check(config)

    # What is evaluated on, and what is trained on, which may not be in the evaluation's split.
    task = build_task(config.task)
    held_out = held_out_problems(task, config) if config.eval.enabled else []
    if not source.needs_problems:
        return TaskData(task, None, held_out, recorded=source.recorded(config))
    if config.data.shuffle and TaskFacts.of(task).is_ordered:
        fix = "this task's problems are in an order that matters (task.levels); set data.shuffle=false"
        raise ConfigError("data.shuffle", "true", fix)
    train = train_problems(task, config)
    kept = without_held_out(train, task, held_out) if config.eval.enabled else train
    return TaskData(task, kept, held_out, num_dropped=len(train) - len(kept))


def source_node(config: RunConfig) -> dict[str, Any]:
    """The group `rollouts` without `record`, which the run acts on, whatever the source."""
    return {name: value for name, value in config.rollouts.items() if name != "record"}


def records(config: RunConfig) -> bool:
    """Whether the run writes its rollouts to a store. A source of the user's own need not have the key."""
    return config.rollouts.get("record", True)


def train_problems(task: Task, config: RunConfig) -> Sequence[Problem]:
    """The problems that `data` chooses, before those that are held out are left out of them."""
    available = task.problems(Split.TRAIN)
    first, count = config.data.train_seed_start, config.data.num_train_seeds
    if count is None:
        last = len(available) if len(available) < MANY else first + ENDLESS_TASK_PROBLEMS
        return _chosen(available, range(first, last), "data.train_seed_start", first)
    return _chosen(available, range(first, first + count), "data.num_train_seeds", count)


def held_out_problems(task: Task, config: RunConfig) -> Sequence[Problem]:
    """The problems that evaluations ask."""
    available = task.problems(Split.EVAL)
    if ids := config.eval.ids:
        if len({*ids}) < len(ids):  # one answer, counted as several, makes intervals too narrow
            raise ConfigError("eval.ids", ids, "names a problem more than once; name each once")
        return _chosen(available, ids, "eval.ids", ids)
    first, wanted = config.eval.id_seed_start, config.eval.num_ids
    left = max(len(available) - first, 0)
    if left == 0:
        return _chosen(available, [], "eval.id_seed_start", first)
    count = wanted if isinstance(wanted, int) else left if wanted == "all" else min(left, EVAL_PROBLEMS)
    return _chosen(available, range(first, first + count), "eval.num_ids", wanted)


def _chosen(available: Sequence[Problem], indices: Sequence[int], key: str, value: object) -> Sequence[Problem]:
    """Those of the available problems. `key` and `value`: the setting that a mistake is about."""
    if not indices:
        raise ConfigError(key, value, f"no problem is left, the task has {len(available)}")
    ends = (indices[0], indices[-1]) if isinstance(indices, range) else (min(indices), max(indices))
    for index in ends:
        if not 0 <= index < len(available):
            known = f"the task has {len(available)} (0 to {len(available) - 1})"
            fix = "; eval.num_ids=all takes every one" if key == "eval.num_ids" else ""
            raise ConfigError(key, value, f"asks for problem {index} and {known}{fix}")
    if len(indices) > MAX_PROBLEMS:
        fix = f"{len(indices):,} problems are more than {MAX_PROBLEMS:,}; set "
        fix += "data.num_train_seeds" if key.startswith("data.") else "eval.num_ids"
        raise ConfigError(key, value, f"{fix} to a number below that")
    chosen = [available[i] for i in indices]
    # an answer that is a number equals no completion, and every reward would be 0
    wrong = next((each for each in chosen if not isinstance(each, Problem) or not isinstance(each.answer, str)), None)
    if wrong is not None:
        raise ConfigError(
            f"task: problems() has {wrong!r:.80}; each must be an offline_grpo.types.Problem with a text as answer"
        )
    return chosen


def without_held_out(train: Sequence[Problem], task: Task, held_out: Sequence[Problem]) -> Sequence[Problem]:
    """The training problems whose prompts are not in the evaluation's split. Of a split without end, only those that
    the run evaluates on are looked at.
    """
    available = task.problems(Split.EVAL)
    prompts = {prompt_key(problem) for problem in (available if len(available) <= MAX_PROBLEMS else held_out)}
    kept = [problem for problem in train if prompt_key(problem) not in prompts]
    if not kept:
        raise ConfigError(
            "eval.id_seed_start: every training problem is held out too; choose ranges (data.train_seed_start, "
            "data.num_train_seeds, eval.id_seed_start, eval.num_ids), splits or files that differ"
        )
    return train if len(kept) == len(train) else kept


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
    settings, facts = config.scoring, TaskFacts.of(task)
    if settings.workers == 0 or facts.scores_safely:
        return task
    from offline_grpo.generation.scoring import IsolatedTask, Scorers
    from offline_grpo.generation.scoring_worker import Setup

    # Each process of the run has its share of the workers. A worker builds the task anew, from its settings.
    num_live = -(-settings.episodes // num_processes) if facts.plays else 0
    num_workers = max(num_live, -(-settings.workers // num_processes))
    setup = Setup(
        make_task=pickle.dumps(partial(build_task, config.task)),
        preload=(build_task.__module__, *facts.worker_imports),
        num_workers=num_workers,
        timeout_s=settings.timeout_s,
        memory_bytes=settings.memory_mib * 2**20,
        printed=None if folder is None else folder.absolute() / "scoring.log",
    )

    if on_cluster:
        from offline_grpo.generation.scoring import ClusterScorers

        assert config.placement.address is not None
        scorers = ClusterScorers(config.placement.address, config.placement.ray_init, setup)
    else:
        scorers = Scorers(setup)
    isolated_task = IsolatedTask(task, scorers, settings, num_live)
    stack.callback(isolated_task.close)
    return isolated_task
