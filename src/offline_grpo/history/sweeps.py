"""`--multirun`: its folder, exit codes and table; how a sweep is resumed.

A resumed sweep has the overrides that it recorded in `multirun.yaml`, so its jobs have the numbers and folders that
they had: finished ones are skipped, interrupted ones continue, and the others start. This module imports no torch.
"""

from __future__ import annotations

import atexit
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from offline_grpo.commands import cli
from offline_grpo.config.compose import key_of, quoted
from offline_grpo.disk import matching
from offline_grpo.errors import ConfigError, GrpoError
from offline_grpo.history import resume
from offline_grpo.history.folder import Lock, discard_fresh
from offline_grpo.history.signals import is_main
from offline_grpo.report.runs import read_yaml

RECORD = "multirun.yaml"
PART = r"'[^']+'|\"[^\"]+\"|[^,\[\]'\"]+"  # of the values of an override
ROOT = Path("multirun")  # where sweeps are, by `hydra.sweep.dir` in conf/config.yaml
OF_ONE_START = ("resume", "hydra.sweep.dir", "hydra.mode", "hydra.searchpath")  # a resumed sweep has its own
FAILED = ".failed_jobs"
"""Folder in that of a sweep: a file for each job that failed, with its exit code. Jobs may be other processes."""
LOCAL = "hydra_plugins.offline_grpo_launchers.LocalLauncher"
"""Replaces the launcher `joblib` here, because no YAML file can: Hydra's plugin has registered the name."""


class RunCallback(Callback):
    """Enabled in `conf/config.yaml`. Refuses a folder in which another process writes before Hydra makes it, and locks
    that of a sweep; prints the sweep's table, and ends the process with the exit code of its worst job.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if is_main():  # processes beside the first have no folders
            with refusing():
                Lock(Path(config.hydra.run.dir), f"hydra.run.dir={config.hydra.run.dir}").release()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._folder, self._process = Path(config.hydra.sweep.dir).resolve(), os.getpid()
        with refusing():
            # The runs of a search must have a value, and one that it makes better.
            value, loggers = "a search looks for the highest last pass@1 of its runs", [*(config.logger or {})]
            direction = str(config.hydra.sweeper.get("direction", "maximize")).rpartition(".")[2]
            for is_good, key, found, fix in (
                (config.eval.enabled, "eval.enabled", "false", "; leave it out"),
                (1 in config.eval.ks, "eval.ks", config.eval.ks, "; name 1 too"),
                ("json" in loggers, "logger", loggers, ", and json alone keeps it; name json too"),
                (direction == "maximize", "hydra.sweeper.direction", direction, "; use maximize"),
            ):
                if not is_good and not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
                    raise ConfigError(key, found, f"{value}{fix}")
            n_jobs = config.hydra.launcher.get("n_jobs", 1)
            if type(n_jobs) is not int or n_jobs == 0:
                fix = "must be at least 1, or -1 for as many as this machine has cores"
                raise ConfigError("hydra.launcher.n_jobs", n_jobs, fix)
            Lock(self._folder, f"hydra.sweep.dir={config.hydra.sweep.dir}")  # until the process ends

        shutil.rmtree(self._folder / FAILED, ignore_errors=True)  # of a start that was interrupted
        OmegaConf.save(config, self._folder / RECORD)  # Hydra's sweeper of a grid does, and Optuna's does not
        atexit.register(self._print_table)  # an interrupted sweep has one too, of the runs so far
        if (launcher := config.hydra.launcher)._target_.endswith(".JoblibLauncher"):
            with read_write(launcher):
                launcher._target_ = LOCAL

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._print_table)
        self._print_table()
        leave_if_failed(self._folder)

    def _print_table(self) -> None:
        if os.getpid() != self._process:  # forked by a launcher
            return
        from offline_grpo.logger import output_console
        from offline_grpo.report.sweep import print_sweep

        with suppress(ConfigError):  # no job started a run, and each has reported why
            print_sweep([self._folder], output_console())


@contextmanager
def refusing() -> Iterator[None]:
    """End the process in one line where Hydra would make a warning of a callback's exception."""
    try:
        yield
    except GrpoError as error:
        cli.leave(error)


def report_failure(folder: Path, number: int, why: str, exit_code: int) -> None:
    """Say why a job of the sweep in this folder has failed, and keep its exit code for `leave_if_failed`, which another
    process may call.
    """
    cli.say(f"error in job {number} of the sweep: {why}")
    (folder / FAILED).mkdir(parents=True, exist_ok=True)
    (folder / FAILED / str(number)).write_text(str(exit_code))


def leave_if_failed(folder: Path) -> None:
    """End the process if jobs of the sweep in this folder have failed, each of which has said why."""
    codes = [int(path.read_text()) for path in (folder / FAILED).glob("*")]
    if codes:
        shutil.rmtree(folder / FAILED)
        discard_fresh(folder)
        jobs = "1 job" if len(codes) == 1 else f"{len(codes)} jobs"
        cli.say(f"{jobs} of the sweep failed, with an error above; a refused one has no row")
        if folder.exists():
            cli.say(how_it_goes_on(folder))
        sys.exit(max(codes))


def how_it_goes_on(folder: Path) -> str:
    """The command that resumes the sweep in this folder, if there is one: what a person is told of one that was stopped
    or has failed jobs.
    """
    record = folder / RECORD
    if not record.is_file() or _recorded(record) is None:
        return "a search starts anew"
    return f"continue the sweep with: {resume.command(folder.resolve())}"


def check_folder(folder: Path) -> None:
    """Raise ConfigError if another job of this sweep has the current job's folder."""
    config, stored = HydraConfig.get(), folder / ".hydra" / "hydra.yaml"
    if not stored.is_file():
        return
    if (other := read_yaml(stored)["hydra"]["job"]["num"]) != config.job.num:
        fix = "let it have ${hydra.job.num} in it, or each key that is swept over"
        raise ConfigError(f"hydra.sweep.subdir={config.sweep.subdir}: job {other} of the sweep has that folder; {fix}")
    # A search that is resumed repeats its runs: one with other values would be given the result of this folder.
    before, now = (
        {key_of(word): word for word in words}
        for words in (read_yaml(folder / ".hydra" / "overrides.yaml") or [], config.overrides.task)
    )
    for key in map(key_of, config.sweeper.get("params") or {}):
        if (old := before.get(key)) != (new := now.get(key)):
            fix = "an earlier run gave another result, or Optuna is another version; start another search"
            raise ConfigError(f"{new}: run {config.job.num} of this search has {old}; {fix}")


@contextmanager
def numbered_lines() -> Iterator[None]:
    """Where jobs run at the same time, begin each line that this one prints with its number, without a live display."""
    config = HydraConfig.get()
    if config.launcher._target_.endswith(".BasicLauncher"):
        yield
        return
    number = config.job.num
    with redirect_stdout(NumberedLines(sys.stdout, number)), redirect_stderr(NumberedLines(sys.stderr, number)):
        yield


class NumberedLines(io.TextIOBase):
    """Passes whole lines to `stream`, each after `[NUMBER] ` in one write: those of several processes do not mix."""

    def __init__(self, stream: TextIO, number: int) -> None:
        self._stream, self._number, self._rest = stream, number, ""

    def write(self, text: str, /) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._stream.write("".join(f"[{self._number}] {line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


# Resuming


def newest_alike(typed: Sequence[str]) -> Path | None:
    """The newest sweep that was started with the same overrides and the same order of jobs, finished or not."""
    wanted = [word for word in typed if key_of(word) not in OF_ONE_START]
    for path in sorted(matching(ROOT, f"*/*/{RECORD}"), reverse=True):
        own = _recorded(path)
        if own is not None and sorted(own) == sorted(wanted) and _swept(own) == _swept(wanted):
            return path.parent.resolve()
    return None


def overrides(sweep: Path, typed: Sequence[str]) -> list[str]:
    """What starts a sweep again: its own overrides, and on top those that are typed now. Raises ConfigError for a
    search that drew at random, and where the typed overrides would give its runs other numbers.
    """
    own = _recorded(sweep / RECORD)
    if own is None:
        fix = "this search drew at random, so its runs cannot be found again; set hydra.sweeper.sampler.seed the next "
        raise ConfigError("resume", sweep, f"{fix}time")

    # Relative paths were typed where the sweep was started.
    place = Path(read_yaml(sweep / RECORD)["hydra"]["runtime"]["cwd"])

    def absolute(found: re.Match[str]) -> str:
        path = place / found[0].strip("\"'")
        return quoted(path) if path.exists() else found[0]

    for index, word in enumerate(own):
        key, _, value = word.partition("=")
        if place != Path.cwd() and key_of(word).rpartition(".")[2] in resume.LOCAL:
            own[index] = f"{key}={re.sub(PART, absolute, value)}"

    # A job's number is its place among the values that are swept over, so these stay.
    further = [word for word in typed if key_of(word) not in OF_ONE_START and word not in own]
    again, swept = {key_of(word) for word in further}, [*_swept(own), *_swept(further)]
    for key in again & {key_of(word) for word in swept}:
        fix = f"leave {key} out, or start another sweep by leaving resume out"
        raise ConfigError(f"{key}: another value would number the runs of {sweep} anew; {fix}")
    folders = [word for word in typed if key_of(word) == resume.SEARCH_PATH] or resume.search_path(sweep)
    kept = [word for word in own if key_of(word) not in again]
    return [*kept, *further, *folders, "resume=auto", f"hydra.sweep.dir={quoted(sweep)}"]


def _recorded(path: Path) -> list[str] | None:
    """The overrides that a sweep was started with, by its `multirun.yaml`; None of a search that drew without a seed.

    One with a seed is resumed by repeating it: finished runs are skipped and tell Optuna their pass@1, so that it asks
    for the same runs.
    """
    record = read_yaml(path)["hydra"]
    sweeper = record["sweeper"]
    if not sweeper["_target_"].endswith(".BasicSweeper") and sweeper.get("sampler", {}).get("seed") is None:
        return None
    words = [*record["overrides"]["task"], *record["overrides"]["hydra"]]
    return [word for word in words if key_of(word) not in OF_ONE_START]


def _swept(words: Sequence[str]) -> list[str]:
    parsed = OverridesParser.create().parse_overrides(list(words))
    return [word for word, override in zip(words, parsed, strict=True) if override.is_sweep_override()]
