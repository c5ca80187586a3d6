"""Sets of held-out problems for a command line of `offline_grpo.evaluate`: `task=arithmetic,gsm8k eval.ks=[1,8]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Task
from offline_grpo.report.run_files import read_yaml
from offline_grpo.run import config as conf
from offline_grpo.run.config import key_of
from offline_grpo.run.plan import evaluation_sampling
from offline_grpo.run.resume import search_path
from offline_grpo.run.task_data import build_task, held_out_problems
from offline_grpo.settings import RunConfig
from offline_grpo.types import Problem, SamplingParams

OF_TRAINING_ALONE = (
    *("resume", "logger", "checkpoint", "hydra", "rollouts"),
    *("eval.backend", "eval.base_url", "eval.weight_sync"),
)
"""Overrides of a run that say nothing about the evaluation of its checkpoints."""


@dataclass(frozen=True)
class EvaluationSet:
    """One set: its name, what it is made of, and how completions are drawn."""

    name: str
    config: RunConfig
    plain: Mapping[str, Any]
    task: Task
    problems: Sequence[Problem]
    sampling: SamplingParams


def saved_overrides(run_folder: Path | None, words: Sequence[str]) -> list[str]:
    """The overrides of the run that wrote a checkpoint, but for those that do not matter or that `words` replace, and
    the folders in which they were found."""
    if run_folder is None or not (run_folder / ".hydra" / "overrides.yaml").exists():
        return []
    groups = _options(words).keys()
    left_out = {*OF_TRAINING_ALONE, *groups, *(("engine", "weight_sync") if "generation" in groups else ())}
    saved = read_yaml(run_folder / ".hydra" / "overrides.yaml") or []
    folders = [] if _search_path(words) else search_path(run_folder)  # Hydra reads one
    return folders + [
        word for word in saved if not any(re.match(rf"{re.escape(key)}([.@]|$)", key_of(word)) for key in left_out)
    ]


def evaluation_sets(base: Sequence[str], words: Sequence[str]) -> list[EvaluationSet]:
    """A set for every combination of the values that `words` give, as in a sweep; one if each key has one value.

    Args:
        base: overrides that come before those of the command line.

    Raises:
        ConfigError: what makes no set, or a key that cannot differ between sets. Hydra's own errors for what cannot be
        composed.
    """
    conf.register()
    choices = []
    for override in OverridesParser.create().parse_overrides(list(words)):
        key, word = override.get_key_element(), str(override.input_line)
        if not override.is_sweep_override():
            choices.append([(word, "")])
            continue
        if key != "task" and not key.startswith(("task.", "eval.")):
            raise ConfigError(f"{word}: sets of problems can differ in task and eval alone; give one value")
        values = list(override.sweep_string_iterator())
        choices.append([(f"{key}={value}", value if key == "task" else f"{key}={value}") for value in values])
    return [
        _held_out(base, [word for word, _ in each], [name for _, name in each if name]) for each in product(*choices)
    ]


def _held_out(base: Sequence[str], words: Sequence[str], names: Iterable[str]) -> EvaluationSet:
    cfg = conf.composed([*base, *words])
    if (option := _options(words).get("task")) is not None:
        _leave_out_what_another_task_has(cfg.task, option, words, _search_path([*base, *words]))
    config = conf.typed(cfg)
    task = build_task(config.task)
    return EvaluationSet(
        name=" ".join(names) or type(task).__name__.lower(),
        config=config,
        plain=conf.as_plain(cfg),
        task=task,
        problems=held_out_problems(task, config),
        sampling=evaluation_sampling(config),
    )


def _leave_out_what_another_task_has(
    node: DictConfig, option: str, words: Sequence[str], folders: Sequence[str]
) -> None:
    """An `experiment` of the run may have settings of its own task, beside those of the task that `words` choose."""
    own = {
        *conf.composed([*folders, f"task={option}"]).task,
        *(key.split(".")[1] for key in map(key_of, words) if key.startswith("task.")),
    }
    with open_dict(node):
        for name in {*node} - own:
            del node[name]


def _search_path(words: Sequence[str]) -> list[str]:
    return [word for word in words if key_of(word) == "hydra.searchpath"]


def _options(words: Sequence[str]) -> dict[str, str]:
    """The groups that `words` choose an option of."""
    pairs = ((key_of(word), word.partition("=")[2]) for word in words)
    return {key: value for key, value in pairs if value and (conf.folder() / key).is_dir()}
