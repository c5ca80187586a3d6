"""Wait for what other processes and threads do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(is_so: Callable[[], T], seconds: float = 300, told: Callable[[], str] = lambda: "waited in vain") -> T:
    """Ask until it is. Returns the answer."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)
    return found
