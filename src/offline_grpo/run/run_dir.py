"""The folder of a run, and the search for the run that `resume` refers to.

outputs/DATE/TIME/  .hydra/  run.log  environment.json  metrics/{train,eval}_iter_NNN.json  checkpoints/iter_NNN/
                    report.png
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.checkpoint.files import latest_checkpoint, latest_state, newest_sound, verified_state
from offline_grpo.checkpoint.state import TrainerState
from offline_grpo.disk import matching
from offline_grpo.errors import CheckpointError, ConfigError
from offline_grpo.redaction import flat, redacted
from offline_grpo.report.run_files import WITHOUT_EFFECT
from offline_grpo.run import lock
from offline_grpo.train.schedule import LrSchedule

ABANDONED_AFTER_S = 86400.0
FOLDERS = ("metrics", "samples", "rollouts", "checkpoints", "profile")
"""Of a run's folder, those with a file or folder for each iteration. Other files there may be anybody's:
`hydra.run.dir=.` is allowed.
"""

NO_RESULTS = {".hydra", "run.log", lock.NAME, "multirun.yaml", ".submitit", ".failed_jobs", ".taken_folders"}
"""What the folder of a run or a sweep has before there is any result."""

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

    def misses_evaluation(self, state: TrainerState) -> bool:
        """Whether the evaluation after a checkpoint's iteration was cut short: it was due, and the iteration has a
        record, but the evaluation has none.
        """
        done, evaluation = state.iteration + 1, state.config["eval"]
        is_due = done == state.config["train"]["iterations"] or done % evaluation["interval"] == 0
        train, held_out = (self.metrics / f"{name}_iter_{state.iteration:03d}.json" for name in ("train", "eval"))
        return evaluation["enabled"] and is_due and train.exists() and not held_out.exists()

    def contents(self) -> Iterator[Path]:
        """What is in its `FOLDERS`."""
        return (path for name in FOLDERS for path in (self.path / name).glob("*"))

    def create(self) -> None:
        """Create the folders.

        Raises:
            ConfigError: the folder is not writable.
        """
        try:
            self.metrics.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={self.path}: cannot be written ({error.strerror}); choose a folder that you can write to"
            ) from error


@dataclass(frozen=True)
class ResumePoint:
    """The run to resume, the checkpoint to resume from, what its `trainer/state.json` says, and, once that was checked
    (`going_on.py`), what differs now and how the learning rate goes on."""

    run_dir: RunDir
    checkpoint: Path
    state: TrainerState
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # see `changed_keys`
    lr_schedule: LrSchedule | None = None

    @property
    def num_done(self) -> int:
        """Complete iterations."""
        return self.state.iteration + 1


def find_resume_point(resume: str | None, fresh: RunDir, config: Mapping[str, Any]) -> ResumePoint | None:
    """The checkpoint that `resume` refers to, or None to start a new run. Locks the folder that the run will write to.

    Args:
        resume: None; the path of a run folder or of a checkpoint in one; or "auto". "auto" takes `fresh` itself if it
            has a checkpoint,
            otherwise the newest run with the same configuration and a checkpoint, finished or not. Of a run, its newest
            sound checkpoint.
        fresh: the folder that Hydra created for this start.
        config: the resolved configuration.

    Raises:
        ConfigError: the path contains no checkpoint, or another process writes there. With "auto", also if another
            process is at a run of
            the same configuration.
        CheckpointError: the checkpoint is damaged, or all of the run's are.
    """
    like = lock.likeness(_comparable(config))
    if resume is None:
        lock.take(fresh.path, f"hydra.run.dir={fresh.path}", like)
        return None
    if resume == "auto":
        root = _root(fresh.path)
        with nullcontext() if root is None else lock.choosing(root):
            point = _newest_in(fresh, "resume=auto", like) or (
                None if root is None else _newest_alike(root, fresh, config, like)
            )
            if point is None or point.run_dir == fresh:
                lock.take(fresh.path, "resume=auto", like)
            return point
    path = Path(resume).expanduser().resolve()
    if os.path.lexists(path / "trainer") or path.name.startswith("iter_"):
        run = RunDir(path.parent.parent)
        if path.is_dir():
            lock.take(run.path, f"resume={resume}", like)
        return ResumePoint(run, path, verified_state(path))
    point = _newest_in(RunDir(path), f"resume={resume}", like)
    if point is None:
        raise no_checkpoint(resume)
    return point


def no_checkpoint(resume: str) -> ConfigError:
    """Of `resume=PATH`, where there is nothing to go on from."""
    return ConfigError(
        f"resume={resume}: no checkpoint there; give a run folder, one of its checkpoints/iter_NNN, or auto"
    )


def _newest_in(run: RunDir, key: str, like: str) -> ResumePoint | None:
    """Lock the folder of a run, if it has a checkpoint. The newest is found after that: whoever had the lock may have
    written one.
    """
    if latest_checkpoint(run.checkpoints) is None:
        return None
    lock.take(run.path, key, like)
    found = newest_sound(run.checkpoints)
    return ResumePoint(run, *found) if found is not None else None


def _newest_alike(root: Path, fresh: RunDir, config: Mapping[str, Any], like: str) -> ResumePoint | None:
    for run in _earlier_runs(root, fresh.path):
        lock.refuse_another(run, "resume=auto", like)
        latest = latest_state(run / "checkpoints")
        if latest is not None and changed_keys(latest.config, config):  # before all files of its checkpoints are read
            continue
        try:
            point = _newest_in(RunDir(run), "resume=auto", like)
        except CheckpointError as error:
            log.warning("%s; skipped", error)
            lock.release(run)
            continue
        if point is not None:
            return point
    return None


def _root(fresh: Path) -> Path | None:
    """`outputs` for outputs/DATE/TIME. None for other folders: one that was named by hand, as for a job that the
    scheduler requeues, or that of a job of a sweep, which goes on as a whole (`sweep_resume.py`)."""
    return fresh.parent.parent if re.fullmatch(r"\d{4}-\d{2}-\d{2}", fresh.parent.name) else None


def _earlier_runs(root: Path, fresh: Path) -> list[Path]:
    """The other runs under the same root, newest first."""
    return sorted((path for path in matching(root, "*/*") if path != fresh), reverse=True)


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved, now) for every value that differs, except keys that do not affect training."""
    old, new = _comparable(saved), _comparable(json.loads(json.dumps(config)))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, of the keys that affect training. All secrets are alike, and checkpoints have none."""
    return {key: value for key, value in flat(redacted(config)).items() if key.split(".")[0] not in WITHOUT_EFFECT}


def remove_abandoned(run_dir: RunDir) -> None:
    """Delete the unfinished checkpoints of runs under the same root that were killed more than a day ago: nobody may go
    on with them.
    """
    root = _root(run_dir.path)
    for hidden in matching(root, "*/*/checkpoints/.writing_*") if root is not None else ():
        with suppress(OSError):  # somebody else's, or deleted meanwhile
            if time.time() - hidden.stat().st_mtime > ABANDONED_AFTER_S and lock.owner(hidden.parent.parent) is None:
                shutil.rmtree(hidden, ignore_errors=True)


def discard_fresh(folder: Path) -> None:
    """Delete the folder that Hydra made for a run or a sweep, if nothing else was written to it: it was rejected, or
    resumes another.

    The folder in which the run was started stays, as do those above it. It is what the other processes of a run have
    for a folder.
    """
    folder, here = folder.resolve(), Path.cwd()
    kept = {here, *here.parents}
    if folder in kept:
        return
    with suppress(FileNotFoundError, NotADirectoryError):
        if {path.name for path in folder.iterdir()} <= NO_RESULTS:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in (folder.parent, folder.parent.parent):
                if parent not in kept and not any(parent.iterdir()):
                    parent.rmdir()
