"""One process at a time writes to the folder of a run or of a sweep: it holds a lock on the file `.lock` there for as
long as it lives.

The kernel lets go of the lock however the process ends, so a file that a dead process left behind never stands in the
way. What is in the file is for people, and for `resume=auto`, which must recognise a run that has no checkpoint yet.
This module imports no torch.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from offline_grpo.disk import matching
from offline_grpo.errors import ConfigError, GrpoError

NAME = ".lock"
WAIT_S, CHOOSING_S, POLL_S = 0.5, 20.0, 0.05
"""A lock that is only looked at is free again within a moment; the choice of the run to go on with reads every run of
the root folder.
"""
RECORD_S = 0.3
"""Who has taken a lock writes its record at once, and a process that is refused in between waits for it."""

_held: dict[Path, int] = {}  # folder -> descriptor of its file

log = logging.getLogger(__name__)


def likeness(configuration: Any) -> str:
    """Equal for equal configurations, which it does not tell."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def take(folder: Path, key: str, like: str = "") -> None:
    """Lock a folder, which is made if it is not there, until `release` or the end of this process. Does nothing if it
    has the lock.

    Args:
        key: what named the folder, for messages.
        like: the `likeness` of what is run there.

    Raises:
        ConfigError: another process writes there, or nobody can.
    """
    folder = folder.resolve()
    record = {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "like": like,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in _held:
            _held[folder] = _locked(folder, key)
            atexit.register(release, folder)
        os.ftruncate(_held[folder], 0)
        os.pwrite(_held[folder], json.dumps(record).encode(), 0)
    except OSError as error:
        raise ConfigError(
            f"{key}: {folder} cannot be made or written ({error.strerror}); choose a folder that you can write to"
        ) from error


def release(folder: Path) -> None:
    """Let go of a folder, if this process has its lock."""
    if (descriptor := _held.pop(folder.resolve(), None)) is not None:
        with suppress(OSError):  # the folder may be gone
            (folder / NAME).unlink()
        os.close(descriptor)


@contextmanager
def released_at_end() -> Iterator[None]:
    """Let go of the folders that are locked inside the block."""
    before = set(_held)
    try:
        yield
    finally:
        for folder in _held.keys() - before:
            release(folder)


def owner(folder: Path) -> Mapping[str, Any] | None:
    """The record of another process that writes to a folder, None if there is none."""
    if folder.resolve() in _held:
        return None
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _record(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def refuse_another(folder: Path, key: str, like: str) -> None:
    """Raise ConfigError if another process runs the same configuration in this folder."""
    if (found := owner(folder)) is not None and found.get("like") == like:
        raise _refusal(folder, key, found)


def refuse_written(path: Path, key: str) -> None:
    """Raise ConfigError if another process writes to the run that this is the folder of, its store of rollouts or a
    file of that.
    """
    store = path.parent if path.is_file() else path
    folder = store.parent if store.name == "rollouts" else store
    if (found := owner(folder)) is not None:
        raise _refusal(folder, key, found)


@contextmanager
def choosing(root: Path) -> Iterator[None]:
    """Inside, no other process chooses the folder of this root that it goes on in. Makes the root, because two may be
    the first.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY)
    except OSError:  # then no folder can be made in it, which is told later
        yield
        return
    try:
        with suppress(OSError):
            _wait_for(descriptor, CHOOSING_S)
        yield
    finally:
        os.close(descriptor)


class FolderLock(Callback):
    """Enabled in `conf/config.yaml`. Locks the folder before Hydra writes to it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.run.dir)
        named = config.resume not in (None, "auto")
        _leave_if_refused(lambda: _check_places(config, is_resumed=named))
        _take_or_leave(folder, f"resume={config.resume}" if named else f"hydra.run.dir={folder}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder, words = (
            Path(config.hydra.sweep.dir),
            sorted([*config.hydra.overrides.task, *config.hydra.overrides.hydra]),
        )
        like = likeness([word for word in words if not word.startswith("hydra.sweep.dir=")])
        others = folder.resolve().parent.parent if "resume=auto" in words else None
        _leave_if_refused(lambda: _check_places(config, is_resumed=False))
        _take_or_leave(folder, f"hydra.sweep.dir={folder}", like, others)


def _check_places(config: DictConfig, *, is_resumed: bool) -> None:
    """Raise ConfigError for settings of Hydra's with which a run, or a sweep, would not find again what it has written."""
    if config.hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: paths are relative to where a run is started, resume's too; leave it out"
        )
    if config.hydra.output_subdir != ".hydra" and not is_resumed:
        name = config.hydra.output_subdir or "null"
        raise ConfigError(f"hydra.output_subdir={name}: a resume reads the configuration in .hydra; leave it out")


def _take_or_leave(folder: Path, key: str, like: str = "", others: Path | None = None) -> None:
    def choose() -> None:
        if others is None:
            take(folder, key, like)
            return
        with choosing(others):
            for other in set(matching(others, "*/*")) - {folder.resolve()}:
                refuse_another(other, "resume=auto", like)
            take(folder, key, like)

    _leave_if_refused(choose)


def _leave_if_refused(act: Callable[[], None]) -> None:
    """Hydra makes warnings of a callback's exceptions. Processes beside the first have no folders."""
    from offline_grpo.run import cli, launch

    if not launch.is_main():
        return
    try:
        act()
    except GrpoError as error:
        cli.leave(error)


def _locked(folder: Path, key: str) -> int:
    path = folder / NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_ours = _wait_for(descriptor, WAIT_S)
        except OSError as error:
            log.warning(
                "%s: its file system has no locks (%s); nothing would notice a second run in this folder",
                folder,
                error.strerror,
            )
            return descriptor
        if is_ours and _is_at(path, descriptor):
            return descriptor
        try:
            if not is_ours:
                raise _refusal(folder, key, _record(descriptor))
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether this is still the file at that path: who had it before may have deleted it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _wait_for(descriptor: int, timeout_s: float) -> bool:
    """Whether the lock was to be had.

    Raises:
        OSError: the file system has none.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)


def _record(descriptor: int) -> Mapping[str, Any]:
    """What the owner of a lock has written about itself; empty if nothing comes within `RECORD_S`."""
    deadline = time.monotonic() + RECORD_S
    while True:
        with suppress(ValueError):  # it is being written
            if isinstance(record := json.loads(os.pread(descriptor, 4096, 0)), dict):
                return record
        if time.monotonic() > deadline:
            return {}
        time.sleep(POLL_S)


def _refusal(folder: Path, key: str, found: Mapping[str, Any]) -> ConfigError:
    pid, host = found.get("pid", "?"), found.get("host")
    where = "" if host in (None, platform.node()) else f" on {host}"
    num_runs, num_done = (len(list(folder.glob(pattern))) for pattern in ("*/.hydra", "metrics/train_iter_*.json"))
    done = f"runs begun: {num_runs}" if num_runs else f"iterations recorded: {num_done}"
    return ConfigError(
        f"{key}: process {pid}{where} writes to {folder} (since {found.get('since', '?')}, {done}); stop it{where} with `kill -INT {pid}`, "
        "or start in another folder"
    )


def _forget() -> None:
    """In a forked process: the lock is the parent's, and must not outlive it here."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
