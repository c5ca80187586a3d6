"""Log lines to the terminal and to `run.log`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from textwrap import wrap

import rich
from rich.console import Console


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


_early = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


@contextmanager
def kept_for_log() -> Iterator[None]:
    """Keep messages until `log_to` knows the run's folder; those of a refused start are dropped."""
    package = logging.getLogger("offline_grpo")
    package.setLevel(logging.INFO)
    package.propagate = False
    package.addHandler(_early)
    try:
        yield
    finally:
        package.removeHandler(_early)
        _early.buffer.clear()


def hide_progress_bars() -> None:
    """Those of transformers for loading and saving would disturb the live display. Imports it."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


@contextmanager
def log_to(folder: Path, *, is_main: bool) -> Iterator[None]:
    """Write the package's messages to run.log and, as plain lines, to the terminal, in the first process."""
    package = logging.getLogger("offline_grpo")
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(folder / "run.log")
        to_file.handleError = lambda record: None  # a full disk; the terminal has the line
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers = [ToTerminal(), to_file]
    package.removeHandler(_early)
    for handler in handlers:
        package.addHandler(handler)
        for record in _early.buffer:
            handler.handle(record)
    try:
        yield
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()
