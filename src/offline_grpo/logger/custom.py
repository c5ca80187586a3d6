"""Loggers of the user's own: what they raise is told in one line, after the package's loggers have the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offline_grpo.errors import GrpoError, told
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.samples import Advantages
from offline_grpo.types import Metrics, RolloutGroup


def custom_last(listeners: Mapping[str, RunListener]) -> list[RunListener]:
    """The package's listeners, then those of the user's own as `CustomListener`s: where one of these raises, nobody
    else lacks the record.

    Args:
        listeners: by their keys in the configuration.
    """
    package = __name__.partition(".")[0]
    is_custom = {key: type(listener).__module__.partition(".")[0] != package for key, listener in listeners.items()}
    ours = [listener for key, listener in listeners.items() if not is_custom[key]]
    return [*ours, *(CustomListener(key, listener) for key, listener in listeners.items() if is_custom[key])]


@dataclass(frozen=True)
class CustomListener(RunListener):
    """Passes everything on to a listener of the user's own. All methods raise GrpoError for whatever that one raises.

    Args:
        key: of its node in the configuration.
    """

    key: str
    listener: RunListener

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        with self._named("start"):
            self.listener.start(config, num_iterations)

    def phase(self, name: str, iteration: int) -> None:
        with self._named("phase"):
            self.listener.phase(name, iteration)

    def progress(self, done: int, total: int, unit: str) -> None:
        with self._named("progress"):
            self.listener.progress(done, total, unit)

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        with self._named("rollouts"):
            self.listener.rollouts(name, groups, advantages=advantages, iteration=iteration)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        with self._named("log"):
            self.listener.log(name, metrics, iteration=iteration)

    def close(self) -> None:
        with self._named("close"):
            self.listener.close()

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """One line that names the class, instead of a traceback from inside it."""
        try:
            yield
        except GrpoError:
            raise
        except Exception as error:  # whatever that code raises
            name = f"{type(self.listener).__module__}.{type(self.listener).__qualname__}.{method}"
            raise GrpoError(
                f"{self.key}: {name} raised {told(error)}; the fix belongs in that class, or leave this logger out; "
                "HYDRA_FULL_ERROR=1 shows the traceback"
            ) from error
