"""How long a server may leave open whether it is healthy."""

from __future__ import annotations

PATIENCE_S = 30.0


class Patience:
    """Counts the time from the first of several late answers in a row. Several threads may ask."""

    def __init__(self) -> None:
        self._late: tuple[float, float] | None = None  # when the first was asked for, and when the last had not come

    def well(self) -> None:
        """An answer came in time."""
        self._late = None

    def is_over(self, *, asked_s: float, now_s: float) -> bool:
        """Whether this late answer is one too many. One of long ago, since when nobody has asked, does not count."""
        first_s, last_s = self._late or (asked_s, asked_s)
        if asked_s - last_s > PATIENCE_S / 2:
            first_s = asked_s
        self._late = first_s, now_s
        return now_s - first_s > PATIENCE_S
