"""Work in another thread that never keeps the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """What `call` returns or raises, sooner or later."""
    outcome: Future[T] = Future()
    threading.Thread(target=_settle, args=(outcome, call), daemon=True).start()
    return outcome


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # whatever it is, the thread that waits must learn of it
        outcome.set_exception(error)
