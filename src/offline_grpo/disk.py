"""Writes files whole or not at all, and keeps temporary folders that do not outlive their process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from glob import glob
from pathlib import Path

from offline_grpo import progress
from offline_grpo.errors import ConfigError

UNFINISHED = ".unfinished"
FULL = ("No space left", "Disk quota exceeded", "inline_container", "iostream error")
"""What errors of the system, of safetensors and of pyarrow say; the last two are torch.save's, which names no cause."""


def is_full(error: Exception) -> bool:
    """Whether a file could not be written because its disk, or the user's share of it, is full."""
    return any(words in str(error) for words in FULL)


def user_cache(name: str) -> Path:
    """The folder for what this user's runs keep for later ones; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offline-grpo" / name


def models_cache(cache_dir: str | None) -> Path:
    """The folder for models that runs make."""
    return Path(cache_dir).resolve() if cache_dir is not None else user_cache("models")


def require_new(folder: Path, shown: str) -> None:
    """Raise ConfigError if there is something in `folder`, or in its place; `shown` is the setting, as it is typed."""
    if os.path.isfile(folder) or (os.path.isdir(folder) and any(folder.iterdir())):
        raise ConfigError(f"{shown}: is there already and not empty; name a new folder")


def write_whole(path: Path, content: str | bytes, *, is_private: bool = False) -> None:
    """Write a file that appears complete or not at all, also if the power fails: what it is called until then, `sweep`
    deletes. `is_private`: other users of the machine cannot read it.
    """
    hidden, mode = path.with_name(f".{path.name}{UNFINISHED}"), 0o600 if is_private else 0o666
    try:
        with open(hidden, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def share(folder: Path) -> None:
    """Let everybody read the weights who may read their folder: safetensors makes files for their user alone."""
    for path in folder.rglob("*.safetensors"):
        path.chmod(path.parent.stat().st_mode & 0o666)


def matching(folder: Path, pattern: str) -> list[Path]:
    """What `folder.glob(pattern)` finds, where others delete folders meanwhile, as refused runs delete their own: it
    would raise.
    """
    return [folder / name for name in glob(pattern, root_dir=folder, include_hidden=True)]


def sweep(folder: Path) -> None:
    """Delete what a killed process left unfinished in a run's folder and in those there: files of `write_whole`,
    `.writing_*`. Deeper down there may be other runs, which go on."""
    names = (f".*{UNFINISHED}", ".writing_*")
    for path in [path for name in names for depth in ("", "*/") for path in matching(folder, depth + name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class OwnFolder:
    """A new private folder, named `prefix`, this process's id and then something. Those of processes that have ended
    are deleted.

    This process holds a lock on it for as long as it lives, whatever ends it, so that the next one can tell what was
    left behind from what is used. A process id could not: containers that share a folder have ids of their own.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        remove_left_behind(parent, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():  # another process may have taken it for left behind before it was locked
                    return
                os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def build_once(folder: Path, prefix: str, build: Callable[[Path], None], step: tuple[str, str]) -> Path:
    """Let `build` fill a new folder of `models_cache`, called `prefix...` until it becomes `folder`, unless it exists.
    It appears complete or not at all, also when several processes build it at the same time. `step`: see
    `progress.step`. Raises ConfigError if there can be no cache.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"cannot be made ({error.strerror}); name another folder"
        raise ConfigError("cache_dir", folder.parent, fix) from error
    remove_left_behind(folder.parent, prefix)
    if folder.exists():
        return folder
    # Built beside its place, then renamed: another process may do the same, and the first one wins.
    with OwnFolder(folder.parent, prefix) as scratch:
        with progress.step(*step):
            build(scratch / "model")
            share(scratch / "model")
        try:
            (scratch / "model").rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def remove_left_behind(parent: Path, prefix: str) -> None:
    """Delete the folders of processes that have ended."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or in use
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
