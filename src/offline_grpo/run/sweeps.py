"""`--multirun`: its folder, exit codes and table; how a sweep is resumed; signals to jobs that run in other processes.

A resumed sweep has the overrides that it recorded in `multirun.yaml`, so its jobs have the numbers and folders that
they had: finished ones are skipped, interrupted ones continue, and the others start. This module imports no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, read_write

from offline_grpo.checkpoint.files import latest_state
from offline_grpo.disk import matching
from offline_grpo.errors import ConfigError, GrpoError, require
from offline_grpo.report.run_files import read_yaml
from offline_grpo.run import launch
from offline_grpo.run.config import key_of
from offline_grpo.run.resume_record import has_ended
from offline_grpo.run.run_dir import discard_fresh, take
from offline_grpo.run.signals import HANDLED, StopSignal

RECORD = "multirun.yaml"
ROOT = Path("multirun")
"""Where sweeps are, by `hydra.sweep.dir` in `conf/config.yaml`."""
OF_ONE_START = ("resume", "hydra.sweep.dir", "hydra.mode")
"""Overrides that a resumed sweep does not take over."""
FAILED = ".failed_jobs"
"""Folder in that of a sweep: a file for each job that failed, with its exit code. Jobs may be other processes."""
JOBLIB = "hydra_plugins.offline_grpo_joblib.SavingJoblibLauncher"
"""Replaces the plugin's launcher here, because no YAML file can: the plugin has registered the name `joblib`."""
PR_SET_PDEATHSIG = 1
POLL_S = 0.1

exit_codes: list[int] = []
"""Of the failed jobs of the sweeps that this process has ended."""


class RunCallback(Callback):
    """Enabled in `conf/config.yaml`. Locks the folder of a run or of a sweep before anything is written there; prints a
    sweep's table and collects its exit codes."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        named = config.resume not in (None, "auto")
        _leave_if_refused(config, f"resume={config.resume}" if named else f"hydra.run.dir={config.hydra.run.dir}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._folder, self._process = Path(config.hydra.sweep.dir).resolve(), os.getpid()
        _leave_if_refused(config, f"hydra.sweep.dir={config.hydra.sweep.dir}", self._folder)
        shutil.rmtree(self._folder / FAILED, ignore_errors=True)  # of a start that was interrupted
        record = self._folder / RECORD
        self._record = record.read_bytes() if record.exists() else None  # Hydra writes it next
        atexit.register(self._print_table)  # an interrupted sweep has one too, of the runs so far
        if (launcher := config.hydra.launcher)._target_.endswith(".JoblibLauncher"):
            with read_write(launcher):
                launcher._target_ = JOBLIB

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._print_table)
        self._print_table()
        found = [int(path.read_text()) for path in (self._folder / FAILED).glob("*")]
        exit_codes.extend(found)
        num_runs = len(list(self._folder.rglob(".hydra")))
        if self._record is not None and {*found} == {ConfigError.exit_code} and len(found) >= num_runs:
            (self._folder / RECORD).write_bytes(self._record)  # what all jobs refuse does not stay on record
        shutil.rmtree(self._folder / FAILED, ignore_errors=True)
        if exit_codes:
            discard_fresh(self._folder)

    def _print_table(self) -> None:
        if os.getpid() != self._process:  # forked by a launcher
            return
        from offline_grpo.logger import output_console
        from offline_grpo.report.sweep import print_sweep

        try:
            print_sweep(self._folder, output_console())
        except ConfigError:  # no job started a run, and each has reported why
            pass
        except GrpoError as error:  # a run's files are damaged; the sweep is done all the same
            print(f"error: the sweep has no table: {error}", file=sys.stderr)


def _leave_if_refused(config: DictConfig, key: str, sweep: Path | None = None) -> None:
    """Hydra makes warnings of a callback's exceptions. Processes beside the first have no folders."""
    from offline_grpo.run import cli

    if not launch.is_main():
        return
    try:
        fix = "paths are relative to where a run is started, resume's too; leave it out"
        require(not config.hydra.job.chdir, "hydra.job.chdir", "true", fix)
        take(sweep or Path(config.hydra.run.dir), key)
    except GrpoError as error:
        cli.leave(error)


def record_failure(exit_code: int) -> None:
    """Say that the current job of a sweep has failed."""
    config = HydraConfig.get()
    folder = Path(config.sweep.dir) / FAILED
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(config.job.num)).write_text(str(exit_code))


def check_folder(folder: Path) -> None:
    """Raise ConfigError if another job of this sweep has the current job's folder."""
    config, stored = HydraConfig.get(), folder / ".hydra" / "hydra.yaml"
    if stored.is_file() and (other := read_yaml(stored)["hydra"]["job"]["num"]) != config.job.num:
        fix = "let it have ${hydra.job.num} in it, or each key that is swept over"
        raise ConfigError(f"hydra.sweep.subdir={config.sweep.subdir}: job {other} of the sweep has that folder; {fix}")


@contextmanager
def numbered_lines() -> Iterator[None]:
    """Where jobs run at the same time, begin each line that this one prints with its number, without a live display."""
    config = HydraConfig.get()
    if config.mode is not RunMode.MULTIRUN or config.launcher._target_.endswith(".BasicLauncher"):
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


def sweep_folder(path: str) -> Path | None:
    """The folder of a sweep at this path, None for anything else."""
    folder = Path(path).expanduser().resolve()
    return folder if (folder / RECORD).is_file() else None


def newest_alike(typed: Sequence[str]) -> Path | None:
    """The newest sweep that was started with the same overrides and the same order of jobs, finished or not."""
    wanted = [word for word in typed if key_of(word) not in OF_ONE_START]
    for path in sorted(matching(ROOT, f"*/*/{RECORD}"), reverse=True):
        record = read_yaml(path)["hydra"]
        own = _recorded(record)
        if _is_grid(record) and sorted(own) == sorted(wanted) and _swept(own) == _swept(wanted):
            return path.parent.resolve()
    return None


def overrides(sweep: Path, typed: Sequence[str]) -> list[str]:
    """The sweep's own overrides, and on top those that are typed now.

    Raises:
        ConfigError: it is a search, or the typed overrides would give its runs other numbers.
    """
    record = read_yaml(sweep / RECORD)["hydra"]
    if not _is_grid(record):
        raise ConfigError(f"resume={sweep}: a search cannot be resumed, its next runs depend on the earlier ones")
    own = _recorded(record)
    further = [word for word in typed if key_of(word) not in OF_ONE_START and word not in own]
    swept = {key_of(word) for word in _swept(own)}
    for word in further:
        if key_of(word) in swept or _swept([word]):
            fix = f"leave {key_of(word)} out, or start another sweep by leaving resume out"
            raise ConfigError(f"{word}: would number the runs of {sweep} anew; {fix}")
    again = {key_of(word) for word in further}
    return [*(word for word in own if key_of(word) not in again), *further]


def is_finished(run: Path, config: Mapping[str, Any]) -> bool:
    """Whether the job in this folder has nothing left to do with these settings, and has its report."""
    if not (run / "report.png").exists():
        return False
    state = latest_state(run / "checkpoints")
    if state is not None:
        return has_ended(run, state, config)
    from offline_grpo.report.runs import read_run

    return (run / ".hydra" / "config.yaml").is_file() and read_run(run, run.name).is_done


def _recorded(record: Mapping[str, Any]) -> list[str]:
    """The overrides that a sweep was started with, by the part `hydra` of its `multirun.yaml`."""
    words = [*record["overrides"]["task"], *record["overrides"]["hydra"]]
    return [word for word in words if key_of(word) not in OF_ONE_START]


def _swept(words: Sequence[str]) -> list[str]:
    parsed = OverridesParser.create().parse_overrides(list(words))
    return [word for word, override in zip(words, parsed, strict=True) if override.is_sweep_override()]


def _is_grid(record: Mapping[str, Any]) -> bool:
    return record["sweeper"]["_target_"].endswith(".BasicSweeper")


# Signals to jobs that joblib runs in processes of this machine

_of_this_worker = ExitStack()


def sweep_process() -> int | None:
    """The process of the sweep whose jobs this one runs; None in all processes that joblib has not started."""
    parent = multiprocessing.parent_process()
    is_worker = type(multiprocessing.current_process()).__module__.startswith("joblib.")
    return parent.pid if parent is not None and is_worker else None


@contextmanager
def passing_on(stop: StopSignal) -> Iterator[None]:
    """In the sweep's process, while its workers run: each gets the signal that `stop` has received.

    Workers start with signals blocked, until `working` handles them: Python would end a worker with a traceback before.
    Signals to this process arrive in the thread.
    """
    from multiprocessing import resource_tracker

    from joblib.externals.loky.backend import resource_tracker as tracker_of_joblib

    for tracker in (resource_tracker, tracker_of_joblib):  # their start would unblock signals
        tracker.ensure_running()
    has_ended = threading.Event()
    thread = threading.Thread(target=_pass_on, args=(stop, has_ended), name="passes signals on", daemon=True)
    thread.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(stop: StopSignal, has_ended: threading.Event) -> None:
    sent: set[int] = set()
    while not has_ended.wait(POLL_S):
        if stop.number is None:
            continue
        for worker in multiprocessing.active_children():
            if worker.pid is not None and worker.pid not in sent:
                sent.add(worker.pid)
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, stop.number)


@contextmanager
def working() -> Iterator[None]:
    """For a job. In a worker of joblib, a signal that came before it counts, and the sweep's end acts as SIGTERM."""
    sweep = sweep_process()
    if sweep is None:
        yield
        return
    if StopSignal.current() is None:  # the worker's first job
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes from the sweep's process alone, once
        _of_this_worker.enter_context(StopSignal.listening()).hold("this step of the sweep")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        if os.getppid() == sweep:
            yield
    finally:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # while it is idle
        if os.getppid() != sweep:
            os._exit(128 + signal.SIGTERM)  # joblib would wait for the next job
