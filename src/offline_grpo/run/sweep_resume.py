"""`--multirun ... resume=auto` and `resume=FOLDER` of a sweep go on in that sweep's folder, with the overrides that it
recorded.

Its jobs have the numbers, and so the folders, that they had: finished runs are skipped, interrupted ones continue, and
the others start. This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from offline_grpo.checkpoint.files import latest_state
from offline_grpo.disk import matching
from offline_grpo.errors import ConfigError
from offline_grpo.report.run_files import read_yaml
from offline_grpo.run.config import key_of
from offline_grpo.run.run_dir import RunDir
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.milestones import early_stop_reason

ROOT = Path("multirun")
"""Where sweeps are, by `hydra.sweep.dir` in `conf/config.yaml`."""
TYPED = "OFFLINE_GRPO_TYPED"
"""The variable by which a sweep that goes on tells its jobs, which may be anywhere, what keys were typed for that."""
OF_ONE_START = ("resume", "hydra.sweep.dir", "hydra.mode", f"hydra.job.env_set.{TYPED}")
"""Overrides that a sweep that goes on does not take over."""


def sweep_folder(resume: str) -> Path | None:
    """The folder of a sweep that `resume=PATH` names, None for anything else."""
    path = Path(resume).expanduser().resolve()
    return path if (path / "multirun.yaml").is_file() else None


def newest_alike(typed: Sequence[str]) -> Path | None:
    """The newest sweep that was started with the same overrides, finished or not.

    None if there is none, or if the command line says where the sweep is.
    """
    wanted = [word for word in typed if key_of(word) not in OF_ONE_START]
    if any(key_of(word) == "hydra.sweep.dir" for word in typed):
        return None
    for path in sorted(matching(ROOT, "*/*/multirun.yaml"), reverse=True):
        record = read_yaml(path)["hydra"]
        if (
            _is_basic(record)
            and sorted(recorded(record)) == sorted(wanted)
            and _swept(recorded(record)) == _swept(wanted)
        ):
            return path.parent.resolve()
    return None


def overrides(sweep: Path, typed: Sequence[str]) -> list[str]:
    """Those that the sweep was started with, and on top what is typed now.

    Raises:
        ConfigError: it is a search, or the typed overrides would give its runs other numbers.
    """
    record = read_yaml(sweep / "multirun.yaml")["hydra"]
    if not _is_basic(record):
        raise ConfigError(
            f"resume={sweep}: its next runs depend on the earlier ones, so a search starts anew: leave resume out"
        )
    own = recorded(record)
    further = [word for word in typed if key_of(word) not in OF_ONE_START and word not in own]
    swept = {key_of(word) for word in _swept(own)}
    for word in further:
        if key_of(word) in swept or _swept([word]):
            raise ConfigError(
                f"{word}: would number the runs of {sweep} anew; leave {key_of(word)} out, or start another sweep by leaving resume out"
            )
    again = {key_of(word) for word in further}
    return [*(word for word in own if key_of(word) not in again), *further]


def typed_keys() -> set[str]:
    """In a job of a sweep that goes on: what the command line sets by itself, with `resume=FOLDER`."""
    return {*os.environ.get(TYPED, "").split(",")} - {""}


def num_jobs(config: DictConfig) -> int | None:
    """How many jobs a sweep has, None for a search.

    Args:
        config: composed for the sweep, with `hydra`.
    """
    return (
        len(list(_jobs(config.hydra.sweeper.params, config.hydra.overrides.task))) if _is_basic(config.hydra) else None
    )


def check_numbers(config: DictConfig) -> None:
    """That the runs in the folder of a sweep that goes on have the numbers of today's jobs.

    Args:
        config: composed for the sweep, with `hydra`.

    Raises:
        ConfigError: a run there is another job, because the order of the sweep has changed since.
    """
    folder, words = Path(config.hydra.sweep.dir), list(config.hydra.overrides.task)
    if "resume=auto" not in words or not _is_basic(config.hydra):
        return
    for number, job in enumerate(_jobs(config.hydra.sweeper.params, words)):
        stored = folder / str(number) / ".hydra" / "overrides.yaml"
        if not stored.is_file():
            continue
        had, has = (dict(word.split("=", 1) for word in some if "=" in word) for some in (read_yaml(stored), job))
        for key in (key_of(word) for word in _swept(words)):
            if key in had and had[key] != has[key]:
                raise ConfigError(
                    f"{key}={has[key]}: run {number} of {folder} has {key}={had[key]}; keep the order that the sweep was started in"
                )


def is_finished(run: Path, train: Mapping[str, Any] | None = None) -> bool:
    """Whether the run in this folder has nothing left to do.

    Args:
        train: its settings today, None for those it was trained with.
    """
    state = latest_state(run / "checkpoints")
    if state is None:  # `checkpoint.enabled=false`, or it has hardly begun
        from offline_grpo.report.sweep_run import read_run

        return (
            (run / ".hydra" / "config.yaml").is_file()
            and (run / "report.png").exists()
            and read_run(run, run.name).is_done
        )
    settings: Mapping[str, Any] = state.config["train"] if train is None else train
    is_early = early_stop_reason(state.milestones, StopWhenConfig(**settings["stop_when"])) is not None
    has_ended = is_early or state.iteration + 1 >= settings["iterations"]
    return has_ended and not RunDir(run).misses_evaluation(state)


def recorded(record: Mapping[str, Any]) -> list[str]:
    """The overrides that a sweep was started with, by the part `hydra` of its `multirun.yaml`."""
    words = [*record["overrides"]["task"], *record["overrides"]["hydra"]]
    return [word for word in words if key_of(word) not in OF_ONE_START]


def _jobs(params: Mapping[str, Any] | None, words: Sequence[str]) -> list[list[str]]:
    """The overrides of each job, in Hydra's order."""
    first = [f"{key}={value}" for key, value in (params or {}).items()]
    return BasicSweeper.split_arguments(
        _parsed([*first, *(word for word in words if not word.startswith("hydra"))]), None
    )[0]


def _swept(words: Sequence[str]) -> list[str]:
    return [word for word, override in zip(words, _parsed(words), strict=True) if override.is_sweep_override()]


def _parsed(words: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(words))


def _is_basic(record: Any) -> bool:
    return record["sweeper"]["_target_"].endswith(".BasicSweeper")
