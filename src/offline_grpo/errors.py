"""Errors that end a run with one line instead of a traceback, and a reader's end, which ends it with none."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class GrpoError(Exception):
    """A failure with a message for the user. `exit_code` is the exit code of the process."""

    exit_code = 1
    of_one_process = False
    """Whether the other processes of the run do not know of it, so that each one says so for itself."""


class ConfigError(GrpoError):
    """The configuration or the input is invalid: `ConfigError("train.lr", -1, "must be above 0")`, or one message that
    names key and fix.
    """

    exit_code = 2

    def __init__(self, key: str, value: object = None, fix: str | None = None) -> None:
        # a blank text, and half of a character, would not be seen
        shown = repr(value) if isinstance(value, str) and not (value.strip() and value.isprintable()) else value
        super().__init__(key if fix is None else f"{key}={shown}: {fix}")


class EngineError(GrpoError):
    """The sampling engine failed, or its answer does not match the request."""


class EngineDied(EngineError):
    """The server exited, or was restarted without our weights; see `Loop.recovering`."""


class CheckpointError(GrpoError):
    """A checkpoint could not be written or read."""


class ScoreError(GrpoError):
    """A completion could not be scored: the code that judges it raised, or returned something else than a score."""


class RequestError(GrpoError):
    """A request of one program that cannot be answered; the message is a sentence for it."""


class OutOfMemory(GrpoError):
    """A GPU, or the host, has less memory than the run asked for."""

    of_one_process = True


class DiskFull(GrpoError):
    """A file of the run has no room."""

    of_one_process = True


class NonFiniteError(GrpoError):
    """Too many updates in a row had a non-finite loss or gradient."""


class StopRequested(BaseException):
    """A signal asked the run to stop. `exit_code` is 128 + the signal's number, as in a shell. `is_reported` once the
    run has said where it stopped.

    No `Exception`, as KeyboardInterrupt is none: it may be raised anywhere, also where a library catches every error.
    """

    def __init__(self, signal_number: int) -> None:
        self.is_reported = False
        self.signal_name = signal.Signals(signal_number).name
        self.exit_code = 128 + signal_number
        super().__init__(self.signal_name)


def exit_code_of(code: int) -> int:
    """The exit code of a process as a shell has it: 128 + N after signal N, where Python says -N."""
    return code if code >= 0 else 128 - code


def how_ended(exit_code: int) -> str:
    """`exit code 1`, or `signal 9` for 137."""
    return f"signal {exit_code - 128}" if exit_code > 128 else f"exit code {exit_code}"


def reason_of(error: BaseException) -> str:
    """The first line of another library's error, for use in our own message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def told(error: BaseException) -> str:
    """What a user's code raised, in one line: type, message, and place as ` (my_module.py, line 3, in reward)`. Calls
    of the package, of Python and of what the user's code calls in turn are no place.
    """
    raised = type(error).__name__ if not str(error) else f"{type(error).__name__}: {reason_of(error)}"
    own = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")  # <frozen ...>, and <string> of dataclasses
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f.filename for f in frames if not f.filename.startswith(own) or "site-packages" in f.filename]
    if not foreign:
        return raised
    last = next(frame for frame in reversed(frames) if frame.filename == foreign[0])
    return f"{raised} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def require(condition: bool, key: str, value: object, fix: str) -> None:
    """Raise a ConfigError that names key, value and fix, unless `condition` is true."""
    if not condition:
        raise ConfigError(key, value, fix)


def exit_status(command: Callable[[], None]) -> int:
    """Run a command. Returns its exit code; an error that ends it is a line on stderr."""
    try:
        with ending_with_reader():
            command()
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


@contextmanager
def ending_with_reader() -> Iterator[None]:
    """If the reader of the output, such as `head`, ends, this process ends with the exit code of SIGPIPE."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        sys.exit(128 + signal.SIGPIPE)
