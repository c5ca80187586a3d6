"""The jobs of a `--multirun`, wherever a launcher runs them: their exit codes, and whose a line on the shared terminal
is.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, read_write

from offline_grpo.disk import write_whole
from offline_grpo.errors import ConfigError, GrpoError
from offline_grpo.run.run_dir import discard_fresh

RECORD = "multirun.yaml"
FAILED = ".failed_jobs"
"""Folder in that of a sweep, while it lasts: a file for each job that failed, with its exit code. Jobs may be other
processes.
"""

TAKEN = ".taken_folders"
"""As `FAILED`: a file for the folder of each job that has begun, with its number."""

JOBLIB = "hydra_plugins.offline_grpo_joblib.SavingJoblibLauncher"
"""Takes the place of the plugin's launcher. No YAML file can say so: the plugin has registered the name `joblib`."""

exit_codes: list[int] = []
"""Of the failed jobs of the sweeps that this process has ended."""


def record_failure(exit_code: int) -> None:
    """Say that the current job of a sweep has failed."""
    config = HydraConfig.get()
    folder = Path(config.sweep.dir) / FAILED
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(config.job.num)).write_text(str(exit_code))


def take_folder() -> None:
    """Raise ConfigError if another job of this sweep has the current job's folder, and its results there."""
    config = HydraConfig.get()
    mark = Path(config.sweep.dir) / TAKEN / quote(config.sweep.subdir, safe="")
    mark.parent.mkdir(parents=True, exist_ok=True)
    try:
        with mark.open("x") as file:
            file.write(str(config.job.num))
    except FileExistsError:
        if (other := mark.read_text()) != str(config.job.num):
            fix = "let it have ${hydra.job.num} in it, or each key that is swept over"
            raise ConfigError(
                f"hydra.sweep.subdir={config.sweep.subdir}: job {other} of the sweep has that folder; {fix}"
            ) from None


class SweepJobs(Callback):
    """Enabled in `conf/config.yaml`. Refuses a sweep that cannot go on in its folder. Reads the exit codes where the
    sweep was started, and removes the folder of one that ran no job. Where all jobs refuse what a sweep is to go on
    with, its record stays as it was."""

    _record: bytes | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from offline_grpo.run import cli, sweep_resume

        path = Path(config.hydra.sweep.dir) / RECORD
        self._record = path.read_bytes() if path.is_file() else None  # Hydra writes it next
        _forget_marks(path.parent)  # of a start that was killed
        atexit.register(_forget_marks, path.parent.resolve(), of_process=os.getpid())
        try:
            sweep_resume.check_numbers(config)
        except GrpoError as error:
            cli.leave(error)  # Hydra makes warnings of a callback's exceptions
        if (launcher := config.hydra.launcher)._target_.endswith(".JoblibLauncher"):
            with read_write(launcher):
                launcher._target_ = JOBLIB

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from offline_grpo.run import sweep_resume

        folder = Path(config.hydra.sweep.dir)
        found = [int(path.read_text()) for path in (folder / FAILED).glob("*")]
        exit_codes.extend(found)
        is_refused = set(found) == {ConfigError.exit_code}
        if self._record is not None and is_refused and len(found) == sweep_resume.num_jobs(config):
            write_whole(folder / RECORD, self._record)
        if exit_codes:
            discard_fresh(folder)


def _forget_marks(folder: Path, *, of_process: int | None = None) -> None:
    if of_process in (None, os.getpid()):  # and not a process that was forked from that one
        for name in (FAILED, TAKEN):
            shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def numbered_lines() -> Iterator[None]:
    """Where jobs run at the same time, begin each line that this one prints with its number, and have no live display."""
    config = HydraConfig.get()
    if config.mode is not RunMode.MULTIRUN or config.launcher._target_.endswith(".BasicLauncher"):
        yield
        return
    with (
        redirect_stdout(NumberedLines(sys.stdout, config.job.num)),
        redirect_stderr(NumberedLines(sys.stderr, config.job.num)),
    ):
        yield


class NumberedLines(io.TextIOBase):
    """Passes whole lines on to `stream`, each after `[NUMBER] `, in one write, so that those of several processes do
    not mix.
    """

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
