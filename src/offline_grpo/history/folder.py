"""The folder of a run, its lock, and the search for the run that `resume` refers to. Imports no torch.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.checkpoint.files import TrainerState, latest_checkpoint, latest_state, newest_sound, verified_state
from offline_grpo.disk import matching
from offline_grpo.errors import CheckpointError, ConfigError, require
from offline_grpo.redaction import flat, redacted
from offline_grpo.report.runs import WITHOUT_EFFECT, starts_of
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.milestones import early_stop_reason
from offline_grpo.train.schedule import LrSchedule

LOCK = ".lock"
NO_CHECKPOINT = "no checkpoint found; use a run folder, its checkpoints/iter_NNN, or auto"
NO_RESULTS = {".hydra", "run.log", LOCK, "multirun.yaml", ".submitit", ".failed_jobs"}  # no sign of a run
RECORDS = ("metrics", "samples", "rollouts")  # folders with per-iteration files
ITERATION = re.compile(r"(?:^|_)(?:iter_(?P<number>\d+)|init)(?=\.|$)")  # train_iter_004.json, eval_init.json
LOCAL = ("train_id", "ref_id", "teacher", "gguf_file", "chat_template", "path", "cache_dir")
"""Keys, at any depth, whose values may be paths."""

log = logging.getLogger(__name__)

_held: dict[Path, int] = {}  # folder -> descriptor of its lock


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
        """Whether the evaluation after a checkpoint's iteration was cut short: it wrote no metrics."""
        done, settings = state.iteration + 1, state.config["eval"]
        interval = settings["interval"]
        is_due = done == state.config["train"]["iterations"] or (interval > 0 and done % interval == 0)
        train, evaluation = (self.metrics / f"{name}_iter_{state.iteration:03d}.json" for name in ("train", "eval"))
        return settings["enabled"] and is_due and train.exists() and not evaluation.exists()

    def create(self) -> None:
        self.metrics.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def records(self) -> Iterator[tuple[int, Path]]:
        """Iteration and path of each record; -1 is the evaluation before training."""
        for path in (path for name in RECORDS for path in (self.path / name).glob("[!.]*")):
            if (match := ITERATION.search(path.name)) is not None:
                yield int(match["number"] or -1), path


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to start from, the folder that the run writes to, and, from `resume.checked`, the changed keys and
    new learning rates."""

    run_dir: RunDir
    checkpoint: Path
    state: TrainerState
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # see `changed_keys`
    lr_schedule: LrSchedule | None = None

    @property
    def num_done(self) -> int:
        return self.state.iteration + 1

    @property
    def source(self) -> RunDir:
        """The folder of the run that wrote the checkpoint; differs from `run_dir` for older checkpoints."""
        return RunDir(self.checkpoint.parent.parent)


def find_resume_point(resume: str | None, fresh: RunDir, config: Mapping[str, Any]) -> ResumePoint | None:
    """The checkpoint that `resume` refers to, or None to start a new run. Locks the folder that the run will write to.

    Args:
        resume: a run folder: its newest intact checkpoint, or if it has none its beginning; a checkpoint: if not the
        newest, a new run starts in `fresh`; "auto": `fresh` if it has a checkpoint, else the newest run with this
        configuration; or None.
        fresh: this launch's folder.

    Raises ConfigError where there is no checkpoint, another process writes, or a new run would mix with an older one;
    CheckpointError where every checkpoint is damaged.
    """
    if resume is None:
        return _begin(fresh)
    path = fresh.path if resume == "auto" else Path(resume).expanduser().resolve()
    run = run_of(path)
    if resume == "auto" and run is None:
        return _newest_alike(fresh, config) or _begin(fresh, may_repeat=True)
    if run is None and path == fresh.path:  # see `resume.was_cut_short`
        return _begin(fresh, may_repeat=True)
    if run is None:
        raise ConfigError(f"resume={resume}: {NO_CHECKPOINT}")
    if path == run:
        return _newest_in(path, f"resume={resume}")
    state = verified_state(path)
    if latest_checkpoint(run / "checkpoints") != path:
        _begin(fresh)
        return ResumePoint(fresh, path, state)
    take(run, f"resume={resume}")
    return ResumePoint(RunDir(run), path, state)


def run_of(path: Path) -> Path | None:
    """The run folder of this run or checkpoint path; None if there is no run."""
    path = path.expanduser().resolve()
    if path.name.startswith("iter_") or (path / "trainer").is_dir():
        return path.parent.parent
    return path if latest_checkpoint(path / "checkpoints") is not None else None


def is_finished(run: RunDir, state: TrainerState, config: Mapping[str, Any]) -> bool:
    """Whether a run with this newest checkpoint has nothing left to do with these settings."""
    settings = config["train"]
    is_early = early_stop_reason(state.milestones, StopWhenConfig(**settings["stop_when"])) is not None
    is_over = is_early or state.iteration + 1 >= settings["iterations"]
    return is_over and not (config["eval"]["enabled"] and run.misses_evaluation(state))


def _begin(fresh: RunDir, *, may_repeat: bool = False) -> None:
    """Lock the folder of a new run. `may_repeat`: there may be a start that was killed before it saved anything."""
    key = f"hydra.run.dir={fresh.path}"
    take(fresh.path, key)
    may_repeat = may_repeat and not (fresh.path / "report.png").exists()
    is_new = latest_checkpoint(fresh.checkpoints) is None and (may_repeat or not any(fresh.records()))
    fix = "this folder has a run; continue it with resume=auto, or choose another folder"
    require(is_new, "hydra.run.dir", fresh.path, fix)


def _newest_in(run: Path, key: str) -> ResumePoint:
    """The run's newest intact checkpoint, found under the lock: another process may have just written it."""
    take(run, key)
    return ResumePoint(RunDir(run), *newest_sound(run / "checkpoints"))


def _newest_alike(fresh: RunDir, config: Mapping[str, Any]) -> ResumePoint | None:
    """The newest match in `outputs`, for outputs/DATE/TIME; other folders only resume themselves."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", fresh.path.parent.name):
        return None
    for run in sorted(matching(fresh.path.parent.parent, "*/*"), reverse=True):
        latest = latest_state(run / "checkpoints") if run != fresh.path else None
        # one whose first start had changes is a branch of another run
        is_branch = any(start.get("changes") for start in starts_of(run)[:1])
        if latest is None or is_branch or changed_keys(latest.config, config):
            continue
        try:
            return _newest_in(run, "resume=auto")
        except CheckpointError as error:
            log.warning("%s; skipped", error)
            release(run)
    return None


def begin_anew(run: RunDir) -> None:
    """Delete the records and the configuration of an earlier start: this one may have other settings."""
    discard_after(run, -2)
    shutil.rmtree(run.path / ".hydra", ignore_errors=True)


def discard_after(run: RunDir, iteration: int) -> None:
    """Delete records of later iterations, left by a killed launch; this launch repeats them."""
    for number, path in run.records():
        if number > iteration:
            path.unlink()


def copy_metrics(point: ResumePoint) -> None:
    for number, path in point.source.records():
        if number <= point.state.iteration and path.parent.name == "metrics":
            shutil.copy2(path, point.run_dir.metrics / path.name)


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved, now) for every value that differs, except keys that do not affect training."""
    old, new = _comparable(saved), _comparable(config)
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, of the keys that affect training. All secrets are alike, and checkpoints have none."""
    values = {key: value for key, value in flat(redacted(config)).items() if key.split(".")[0] not in WITHOUT_EFFECT}
    return {key: local_path(key, value) for key, value in values.items()}


def local_path(key: str, value: Any) -> Any:
    """Make a value absolute if it names an existing file or folder; else return it."""
    if key.rpartition(".")[2] not in LOCAL or not value:
        return value
    if isinstance(value, list):
        return [local_path(key, each) for each in value]
    is_local = isinstance(value, str) and (key == "cache_dir" or Path(value).exists())
    return os.path.abspath(value) if is_local else value


# The lock: the process that writes to the folder of a run or of a sweep holds a flock on the file `.lock` there. The
# kernel releases it however the process ends.


def take(folder: Path, key: str) -> None:
    """Create a folder if needed, and lock it until `release` or process exit.

    Raises ConfigError, about the setting `key`, if another process writes there or the folder cannot be written.
    """
    folder = folder.resolve()
    if folder in _held:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be made or written ({error.strerror})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 200, 0).decode() or "another"
        os.close(descriptor)
        fix = f"stop it with `kill -INT {owner.split()[0]}`, or start in another folder"
        raise ConfigError(f"{key}: process {owner} is using {folder}; {fix}") from None
    except OSError as error:
        log.warning("%s: its file system has no locks (%s); a second run here would not be noticed", folder, error)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}".encode(), 0)
    _held[folder] = descriptor
    atexit.register(release, folder)


def release(folder: Path) -> None:
    if (descriptor := _held.pop(folder.resolve(), None)) is not None:
        with suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink()
        os.close(descriptor)


@contextmanager
def released_at_end() -> Iterator[None]:
    """On exit, unlock the folders locked inside the block."""
    before = set(_held)
    try:
        yield
    finally:
        for folder in _held.keys() - before:
            release(folder)


def _forget() -> None:
    """Drop the parent's locks in a forked child: they must not outlive it."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def discard_fresh(folder: Path) -> None:
    """Delete the folder of a start that was rejected, or that resumes another run, if it has no results.

    The working directory stays, as do the folders above it: it is the folder of processes beside the first.
    """
    folder, here = folder.resolve(), Path.cwd()
    kept = {here, *here.parents}
    if folder in kept:
        return
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= NO_RESULTS:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # a parent is not empty, or gone
            for parent in (folder.parent, folder.parent.parent):
                if parent not in kept:
                    parent.rmdir()
