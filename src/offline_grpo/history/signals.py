"""SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (Slurm's `--signal=USR1@60`) ask the run to stop: at once where nothing is lost,
otherwise at the end of its iteration. A second signal ends the process. Only the first process of a run says so.

Imports nothing that takes time, so that the signals can be handled from the first moment on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

from offline_grpo.errors import StopRequested

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPEAT_S = 1.0
"""A second signal within this time is the first one again: a terminal sends Ctrl-C to all processes, and launchers pass
it on."""

log = logging.getLogger(__name__)


def num_processes() -> int:
    """The world size, from the launcher's environment variables: before torch is imported."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process is rank 0, from the same."""
    return os.environ.get("RANK", "0") == "0"


class StopSignal:
    """Raises `StopRequested` where the first signal arrives, except in `held` work, which asks `number` or `check`.

    A second signal does what it does without this handler.
    """

    _listening: ClassVar[StopSignal | None] = None

    def __init__(self) -> None:
        self.number: int | None = None
        self._received_s = 0.0
        self._waits_for: str | None = None
        self._line: threading.Thread | None = None

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[StopSignal]:
        """The handler that this process has already, or a new one for the time of the block.

        Outside the main thread, where Python allows no handlers, it never hears a signal. An ignored signal stays
        ignored: a shell that starts a run with `&` ignores SIGINT, because Ctrl-C is meant for its foreground.
        """
        if cls._listening is not None or threading.current_thread() is not threading.main_thread():
            yield cls._listening or cls()
            return
        stop = cls._listening = cls()
        handled = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, stop._handle) for number in handled}
        try:
            yield stop
        finally:
            cls._listening = None
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self, waits_for: str | None) -> Iterator[None]:
        """For work that a signal waits for, except in `interruptible` parts. The text completes "stopping after"."""
        before, self._waits_for = self._waits_for, waits_for
        try:
            yield
        finally:
            self._waits_for = before

    def hold(self, waits_for: str) -> None:
        """As `held`, to the end of the enclosing block."""
        self._waits_for = waits_for

    @contextmanager
    def interruptible(self, allowed: bool = True) -> Iterator[None]:
        """For parts of held work that can be repeated, such as sampling; `allowed=False` waits on."""
        with self.held(None if allowed else self._waits_for):
            if allowed:
                self.check()
            yield

    def check(self) -> None:
        """Raise StopRequested if a signal has arrived."""
        if self.number is not None:
            if self._line is not None:
                self._line.join(timeout=1)  # so that the next line comes after it
            raise StopRequested(self.number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._received_s = number, time.monotonic()
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            after = f" after {self._waits_for}; a second one ends it at once" if self._waits_for else ""
            # in a thread: the code that this handler interrupts may be writing to the log
            self._line = threading.Thread(target=_print, args=(f"{name}: stopping{after}",), daemon=True)
            self._line.start()
            if self._waits_for is None:
                self.check()
        elif time.monotonic() - self._received_s > REPEAT_S:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)  # to the process, because this thread may have it blocked


def _print(line: str) -> None:
    from logging.handlers import MemoryHandler

    if not is_main():
        return
    if all(isinstance(handler, MemoryHandler) for handler in logging.getLogger("offline_grpo").handlers):
        print(line, file=sys.stderr)  # before run.log is open
    else:
        log.warning(line)
