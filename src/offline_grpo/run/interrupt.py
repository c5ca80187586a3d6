"""SIGINT and SIGTERM: stop at a point where the weights match a whole number of iterations, save, and say so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from offline_grpo.errors import StopRequested


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one ends the process at once, as it would have without us.

    Inside `interruptible()` the request interrupts at once: nothing that happens there outlives it. Elsewhere it waits for `check()`.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._is_interruptible = False
        self._previous: dict[int, Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside, give them back afterwards. Does nothing outside the main thread, where Python allows no handlers.

        A signal that this process was told to ignore stays ignored: a shell script that starts a run with `&` sets SIGINT so, and Ctrl-C
        is then meant for the script's foreground alone. SIGTERM stops such a run.
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
        """Code whose effects are lost without harm, such as sampling. `allowed=False` (several processes) makes it wait for `check`."""
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
        """Raise StopRequested if a signal came."""
        if self._received is not None:
            raise StopRequested(self._received)

    def raise_now(self) -> NoReturn:
        """Raise StopRequested because a signal came here or to another process of the run."""
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
