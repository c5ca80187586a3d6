"""Handles SIGINT and SIGTERM: the run stops where the weights match a whole number of iterations, saves and reports it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from offline_grpo.errors import StopRequested


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a stop request; a second one ends the process at once, as without this handler.

    Inside `interruptible()` the request interrupts at once, because the work there can be discarded. Elsewhere it takes effect at the next
    `check()`.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._is_interruptible = False
        self._previous: dict[int, Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block and restore the old handlers afterwards.

        Does nothing outside the main thread, because Python allows handlers only there. A signal that this process was told to ignore
        stays ignored: a shell script that starts a run with `&` does that to SIGINT, because Ctrl-C is meant for the script's foreground.
        SIGTERM stops such a run.
        """
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            self._restore()

    @contextmanager
    def interruptible(self, allowed: bool = True) -> Iterator[None]:
        """For code whose results can be lost without harm, such as sampling.

        With `allowed=False` (several processes), the request waits for `check`.
        """
        self._is_interruptible = allowed
        try:
            if allowed:
                self.check()
            yield
        finally:
            self._is_interruptible = False

    @property
    def is_requested(self) -> bool:
        return self._received is not None

    def check(self) -> None:
        """Raise StopRequested if a signal has arrived."""
        if self._received is not None:
            raise StopRequested(self._received)

    def raise_now(self) -> NoReturn:
        """Raise StopRequested because this process, or another one of the run, received a signal."""
        raise StopRequested(self._received if self._received is not None else signal.SIGTERM)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        self._restore()
        if self._is_interruptible:
            self.check()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
