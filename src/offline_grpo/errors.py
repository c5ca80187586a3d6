"""Errors that end a run with one line instead of a traceback."""

from __future__ import annotations

import signal


class GrpoError(Exception):
    """A failure with a message written for the person who started the run. `exit_code` is what the process returns."""

    exit_code = 1


class ConfigError(GrpoError):
    """Something in the configuration or input is wrong; found before a model is loaded. Names key, value and fix."""

    exit_code = 2


class EngineError(GrpoError):
    """The sampling engine failed or returned something other than what was asked for."""


class EngineDied(EngineError):
    """The server has ended, or was started anew without our weights. `WeightSync.recover` serves them again."""


class CheckpointError(GrpoError):
    """A checkpoint could not be written or read."""


class NonFiniteError(GrpoError):
    """Too many updates in a row had a non-finite loss or gradient."""


class StopRequested(Exception):
    """A signal asked the run to stop. `exit_code` follows the shell's convention, 128 + the signal's number."""

    def __init__(self, signal_number: int) -> None:
        self.signal_name = signal.Signals(signal_number).name
        self.exit_code = 128 + signal_number
        super().__init__(self.signal_name)


def reason_of(error: Exception) -> str:
    """The first line of somebody else's error, for a message of ours."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def require(condition: bool, key: str, value: object, fix: str) -> None:
    """Raise ConfigError naming key, value and fix unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{key}={value}: {fix}")
