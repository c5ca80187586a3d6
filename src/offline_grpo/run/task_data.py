"""A run's problems: those that it trains on, and those that it evaluates on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import RolloutClient, Task, TextCodec
from offline_grpo.rollouts.store.recorder import Origin
from offline_grpo.run.build import build, check_settings, resolve
from offline_grpo.run.run_dir import refuse_written
from offline_grpo.settings import RunConfig
from offline_grpo.task.mixture import of_task
from offline_grpo.task.near_duplicates import NearDuplicate, near_duplicates
from offline_grpo.task.problems import MANY, prompt_key
from offline_grpo.types import Problem, SamplingParams, Split


@dataclass(frozen=True, kw_only=True)
class SourceRuntime:
    """The objects that a rollout source's constructor may ask for by these names; they exist once the model is loaded.

    Args:
        problems: None where the source needs none.
        context: tokens that the model can read; None if it does not say.
        trainer_version: how many updates the trainer has made.
        updates_per_iteration, num_iterations: that are planned.
    """

    client: RolloutClient
    task: Task
    problems: Sequence[Problem] | None
    codec: TextCodec
    vocab_size: int
    context: int | None
    sampling: SamplingParams
    run_folder: Path
    model_id: str
    origin: Origin
    rank: int
    world_size: int
    trainer_version: Callable[[], int]
    updates_per_iteration: int
    num_iterations: int


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

    @cached_property
    def near_duplicates(self) -> Sequence[NearDuplicate]:
        """Looked for when somebody asks: it takes up to a second, which neither a refused start nor a further process
        should.
        """
        return near_duplicates(self.train or (), self.held_out)


def build_task(node: Any, key: str = "task") -> Task:
    """The task of a node; the nodes under `tasks`, which a mixture has, are built first."""
    tasks = node.get("tasks") if isinstance(node, Mapping) else None
    if not isinstance(tasks, Mapping):
        return build(node, key=key, protocol=Task)
    built = {}
    for name, each in tasks.items():
        with of_task(name):
            built[name] = build_task(each)
    return build({**node, "tasks": built}, key=key, protocol=Task)


def task_data(config: RunConfig) -> TaskData:
    """The task and its problems.

    Raises:
        ConfigError: settings of the task or of the source of rollouts, or a choice of problems that the task does not
        have.
    """
    source = resolve(config.rollouts, "rollouts")
    record = config.rollouts.get("record")
    require(record is None or isinstance(record, bool), "rollouts.record", record, "must be true or false")
    settings = {name: value for name, value in source_node(config).items() if name != "_target_"}
    runtime = [field.name for field in fields(SourceRuntime) if field.name != "problems" or source.needs_problems]
    check_settings(source, settings, "rollouts", given_at_runtime=dict.fromkeys(runtime))
    source.check(config)
    named = config.rollouts.get("path") or []
    for path in [named] if isinstance(named, str) else named:
        refuse_written(Path(path), f"rollouts.path={path}")
    task = build_task(config.task)
    if source.needs_problems and config.data.shuffle and getattr(task, "is_ordered", False):
        raise ConfigError(
            "data.shuffle=true: this task's problems are in an order that matters (task.levels); set data.shuffle=false"
        )
    train = train_problems(task, config) if source.needs_problems else None
    held_out = held_out_problems(task, config) if config.eval.enabled else []
    if train is None or not config.eval.enabled:
        return TaskData(task, train, held_out)
    kept = without_held_out(train, task, held_out)
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
    first = config.data.train_seed_start
    count = config.data.num_train_seeds
    if count is None:
        last = len(available) if len(available) < MANY else first + ENDLESS_TASK_PROBLEMS
        return _slice(available, range(first, last), "data.train_seed_start", first)
    return _slice(available, range(first, first + count), "data.num_train_seeds", count)


def held_out_problems(task: Task, config: RunConfig) -> Sequence[Problem]:
    """The problems that evaluations ask."""
    available = task.problems(Split.EVAL)
    if config.eval.ids:
        return _slice(available, config.eval.ids, "eval.ids", config.eval.ids)
    first, wanted = config.eval.id_seed_start, config.eval.num_ids
    left = max(len(available) - first, 0)
    if isinstance(wanted, int):
        return _slice(available, range(first, first + wanted), "eval.num_ids", wanted)
    count = left if wanted == "all" else min(left, EVAL_PROBLEMS)
    key, value = ("eval.id_seed_start", first) if left == 0 else ("eval.num_ids", wanted)
    return _slice(available, range(first, first + count), key, value)


def _slice(available: Sequence[Problem], indices: Sequence[int], key: str, value: object) -> Sequence[Problem]:
    if not indices:
        raise ConfigError(f"{key}={value}: no problem is left, the task has {len(available)}")
    # one answer, counted as several, makes intervals too narrow
    if not isinstance(indices, range) and len(set(indices)) < len(indices):
        twice = next(i for i in indices if indices.count(i) > 1)
        raise ConfigError(f"{key}={value}: names problem {twice} more than once; name each once")
    ends = (indices[0], indices[-1]) if isinstance(indices, range) else (min(indices), max(indices))
    if ends[0] < 0 or ends[1] >= len(available):
        fix = "; eval.num_ids=all takes every one" if key == "eval.num_ids" else ""
        wrong = ends[0] if ends[0] < 0 else ends[1]
        raise ConfigError(
            f"{key}={value}: asks for problem {wrong} and the task has {len(available)} (0 to "
            f"{len(available) - 1}){fix}"
        )
    if len(indices) > MAX_PROBLEMS:
        fix = "data.num_train_seeds" if key.startswith("data.") else "eval.num_ids"
        raise ConfigError(
            f"{key}={value}: {len(indices):,} problems are more than {MAX_PROBLEMS:,}; set {fix} to a number below that"
        )
    chosen = [available[i] for i in indices]
    # an answer that is a number equals no completion, and every reward would be 0
    wrong = next((each for each in chosen if not isinstance(each, Problem) or not isinstance(each.answer, str)), None)
    if wrong is not None:
        raise ConfigError(
            f"task: problems() has {wrong!r:.80}; each must be an offline_grpo.types.Problem with a text as answer"
        )
    return chosen


def without_held_out(train: Sequence[Problem], task: Task, held_out: Sequence[Problem]) -> Sequence[Problem]:
    """The training problems whose prompts are not in the evaluation's split: what is evaluated on must stay what it is.

    Of a split without end, only those that the run evaluates on are looked at.
    """
    available = task.problems(Split.EVAL)
    prompts = {prompt_key(problem): problem for problem in (available if len(available) <= MAX_PROBLEMS else held_out)}
    kept = [problem for problem in train if prompt_key(problem) not in prompts]
    if not kept:
        first = train[0].problem_id
        raise ConfigError(
            f"eval.id_seed_start: every training problem is held out too ({first} as "
            f"{prompts[prompt_key(train[0])].problem_id}); choose "
            "ranges (data.train_seed_start, data.num_train_seeds, eval.id_seed_start, eval.num_ids), splits or "
            "files that differ"
        )
    return train if len(kept) == len(train) else kept
