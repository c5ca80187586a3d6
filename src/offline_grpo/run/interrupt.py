"""Handles SIGINT and SIGTERM: says at once that the run stops and what it waits for, and stops it where nothing is
lost.

Imports nothing that takes time, so that the signals can be handled from the first moment on.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, ClassVar, NoReturn

from offline_grpo.errors import StopRequested
from offline_grpo.run import launch

HANDLED = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 1.0
"""A second signal within this time is the first one again: the terminal sends a Ctrl-C to all processes, and launchers
pass it on.
"""
LAUNCHER_WAITS_S = 20.0
"""After its SIGTERM torchrun waits 30 s, and then kills."""
LOOK_S = 1.0
"""How often a process looks whether the one that launched it is still there."""

log = logging.getLogger(__name__)


def end_at_once() -> None:
    """Until `StopSignal` listens: Ctrl-C ends the process in one line instead of a traceback, from wherever it is."""

    def end(number: int, _frame: FrameType | None) -> None:
        os.write(2, b"\nstopped before the run began; nothing was saved\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def ignore_from_now_on() -> None:
    """The process ends within a fraction of a second, and a signal shall not change its exit code. Python would reset
    other handlers.
    """
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a `StopRequested`; a second one ends the process at once, as without this
    handler.

    The exception is raised where the signal arrives, except while the run is held (`held`, `hold`) and outside of
    `interruptible` in it. A thread says so within a moment, whatever the main thread is busy with: a backward pass in
    C++ may take it many seconds.
    """

    _listening: ClassVar[StopSignal | None] = None

    def __init__(self) -> None:
        self._received: int | None = None
        self._received_s = 0.0
        self._waits_for: str | None = None
        self._is_complete = False
        self._previous: dict[int, Any] = {}
        self._acknowledged = threading.Event()
        self.left_alone: Callable[[StopSignal, int], None] = _tell_that_alone
        """Called when the process that launched this one has ended, with that one's number."""

    @classmethod
    def current(cls) -> StopSignal | None:
        """The handler that this process has, if it has one."""
        return cls._listening

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[StopSignal]:
        """The handler that this process has already, or a new one for the time of the block."""
        if cls._listening is not None:
            yield cls._listening
            return
        stop = cls()
        with stop.installed():
            yield stop

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block and restore the old handlers afterwards.

        Does nothing outside the main thread, because Python allows handlers only there. A signal that this process was
        told to ignore stays ignored: a shell script that starts a run with `&` does that to SIGINT, because Ctrl-C is
        meant for the script's foreground. SIGTERM stops such a run.
        """
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                StopSignal._listening = self
                handled = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
                stack.enter_context(self._acknowledging())
                self._previous = {number: signal.signal(number, self._handle) for number in handled}
            try:
                yield
            finally:
                StopSignal._listening = None
                self._restore()

    @contextmanager
    def held(self, waits_for: str) -> Iterator[None]:
        """For work that a signal has to wait for, except in `interruptible` parts of it.

        Args:
            waits_for: what the run stops after, for people.
        """
        before, self._waits_for = self._waits_for, waits_for
        try:
            yield
        finally:
            if not self._is_complete:
                self._waits_for = before

    def hold(self, waits_for: str) -> None:
        """From here to the end of the enclosing block a signal waits for this."""
        self._waits_for = waits_for

    def begin(self) -> None:
        """A run begins, perhaps after another one in this process: a signal stops it where nothing else is said."""
        self._waits_for, self._is_complete = None, False

    def complete(self, waits_for: str) -> None:
        """The run is complete: from here to its end a signal is only taken note of."""
        self._waits_for, self._is_complete = waits_for, True

    @contextmanager
    def interruptible(self, allowed: bool = True) -> Iterator[None]:
        """For parts of held work whose results can be lost without harm, such as sampling.

        With `allowed=False` (several processes), a signal waits on.
        """
        before = self._waits_for
        try:
            if allowed:
                self._waits_for = None
                self.check()
            yield
        finally:
            self._waits_for = before

    @property
    def number(self) -> int | None:
        """See `StopSignal.number` in interfaces.py."""
        return self._received

    def check(self) -> None:
        """Raise StopRequested if a signal has arrived."""
        if self._received is not None:
            self.raise_now(self._received)

    def raise_now(self, number: int) -> NoReturn:
        """See `StopSignal.raise_now` in interfaces.py."""
        if self._received is not None:
            self._acknowledged.wait(timeout=1)  # so that what is said next comes after it
        raise StopRequested(number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._received is None:
            self._received, self._received_s = number, time.monotonic()
            if self._waits_for is None:
                self.check()
        elif time.monotonic() - self._received_s > REPEAT_S:
            self._previous = {}
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)  # to the process, because this thread may have it blocked

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextmanager
    def _acknowledging(self) -> Iterator[None]:
        """Python writes the number of each signal that arrives into a socket; a thread reads it there."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        listens = (
            reader,
            os.getppid(),
        )  # asked here: once signals are handled, the launcher may end before the thread has begun
        thread = threading.Thread(target=self._acknowledge, args=listens, name="acknowledges signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.close()
            thread.join(timeout=1)  # so that what it says of the last signal is not said later

    def _acknowledge(self, reader: socket.socket, launcher: int) -> None:
        is_alone = False
        reader.settimeout(LOOK_S)
        with reader:  # to its end: Python complains if nobody listens to a later signal
            while True:
                try:
                    numbers = reader.recv(1)
                except TimeoutError:
                    if os.getppid() != launcher and not is_alone:
                        is_alone = True
                        self.left_alone(self, launcher)
                    continue
                if not numbers:
                    return
                if numbers[0] in HANDLED and not self._acknowledged.is_set():
                    self._say(numbers[0])
                    self._acknowledged.set()
                    if numbers[0] == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                        threading.Thread(target=_end_after, args=(LAUNCHER_WAITS_S,), daemon=True).start()

    def _say(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        after = f" after {self._waits_for}; a second one ends it at once" if self._waits_for else ""
        _tell(f"{name}: stopping{after}")


def _end_after(seconds: float) -> None:
    """torchrun sends SIGTERM where another process has failed: this one may wait for that in a collective, and so for
    ever.
    """
    time.sleep(seconds)
    os._exit(128 + signal.SIGTERM)


def _tell_that_alone(_stop: StopSignal, launcher: int) -> None:
    _tell(f"the process that launched this one ({launcher}) has ended; `kill -INT {os.getpid()}` stops this one")


def _tell(line: str) -> None:
    from logging.handlers import MemoryHandler

    if not launch.is_main():
        return
    if all(isinstance(handler, MemoryHandler) for handler in logging.getLogger("offline_grpo").handlers):
        print(line, file=sys.stderr)  # before run.log is there, and nobody will see what is kept for it
    else:
        log.warning(line)
