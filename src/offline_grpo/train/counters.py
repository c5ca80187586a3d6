"""What is counted over the whole run and saved with it. Imports no torch: a checkpoint is judged before anything is
loaded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class UpdateCounters:
    """Updates of the policy."""

    num_updates: int = 0  # attempted, refused ones included: the position in the learning-rate schedule
    num_refused: int = 0
    num_refused_in_a_row: int = 0

    @property
    def version(self) -> int:
        """Updates that the weights carry."""
        return self.num_updates - self.num_refused


@dataclass(frozen=True)
class PushCounters:
    """The version that the engine serves, and the opportunities to push that were not taken since."""

    version: int
    num_skipped: int
