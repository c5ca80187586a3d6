"""The folder of a run, and the lock on it. Imports no torch.

outputs/DATE/TIME/  .hydra/  run.log  environment.json  metrics/{train,eval}_iter_NNN.json  checkpoints/iter_NNN/
                    report.png
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from offline_grpo.checkpoint.files import TrainerState
from offline_grpo.errors import ConfigError

LOCK = ".lock"
NO_RESULTS = {".hydra", "run.log", LOCK, "multirun.yaml", ".submitit", ".failed_jobs"}  # no sign of a run
RECORDS = ("metrics", "samples", "rollouts")  # folders with per-iteration files
ITERATION = re.compile(r"(?:^|_)(?:iter_(?P<number>\d+)|init)(?=\.|$)")  # train_iter_004.json, eval_init.json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDir:
    """The paths inside a run's folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_reported(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "report.png").exists()

    def misses_evaluation(self, state: TrainerState) -> bool:
        """Whether the evaluation after a checkpoint's iteration was cut short: it wrote no metrics."""
        done, settings = state.iteration + 1, state.config["eval"]
        interval = settings["interval"]
        is_due = done == state.config["train"]["iterations"] or (interval > 0 and done % interval == 0)
        train, evaluation = (self.metrics / f"{name}_iter_{state.iteration:03d}.json" for name in ("train", "eval"))
        return settings["enabled"] and is_due and train.exists() and not evaluation.exists()

    def records(self) -> Iterator[tuple[int, Path]]:
        """Iteration and path of each record; -1 is the evaluation before training."""
        for path in (path for name in RECORDS for path in (self.path / name).glob("[!.]*")):
            if (match := ITERATION.search(path.name)) is not None:
                yield int(match["number"] or -1), path

    def discard_after(self, iteration: int) -> None:
        """Delete records of later iterations, left by a start that was killed or that had other settings; this one
        makes them again.
        """
        for number, path in self.records():
            if number > iteration:
                path.unlink()


class Lock:
    """On the folder of a run or of a sweep, which is created if needed: a flock on the file `.lock` there. It ends with
    `release` or with the process, however that ends, and not with processes that this one has started.

    Raises ConfigError, about the setting `key`, if another process writes there or the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder.resolve()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{key}: {self.folder} cannot be made or written ({error.strerror})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode() or "another"
            os.close(descriptor)
            fix = f"stop it with `kill -INT {owner.split()[0]}`, or start in another folder"
            raise ConfigError(f"{key}: process {owner} is using {self.folder}; {fix}") from None
        except OSError as error:
            log.warning("%s: its file system has no locks (%s); a second run here would not be noticed", folder, error)

        # Who holds it is for the message above. A forked child would hold the lock on: it closes its copy.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _owner().encode(), 0)
        self._descriptor: int | None = descriptor
        atexit.register(self.release)
        os.register_at_fork(after_in_child=partial(self.release, in_child=True))

    def release(self, *, in_child: bool = False) -> None:
        if self._descriptor is not None:
            if not in_child:
                (self.folder / LOCK).unlink(missing_ok=True)  # the folder may be gone
            os.close(self._descriptor)
            self._descriptor = None


def _owner() -> str:
    return f"{os.getpid()} on {platform.node()}"


def discard_fresh(folder: Path) -> None:
    """Delete the folder of a start that was rejected, or that resumes another run, if it has no results and no other
    process writes there.

    The working directory stays, as do the folders above it: it is the folder of processes beside the first.
    """
    folder, here = folder.resolve(), Path.cwd()
    kept = {here, *here.parents}
    if folder in kept or not folder.is_dir() or not {path.name for path in folder.iterdir()} <= NO_RESULTS:
        return
    # Another process may have begun here meanwhile.
    if (folder / LOCK).exists() and (folder / LOCK).read_text() != _owner():
        try:
            Lock(folder, str(folder)).release()
        except ConfigError:
            return
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # a parent is not empty, or gone
        for parent in (folder.parent, folder.parent.parent):
            if parent not in kept:
                parent.rmdir()
