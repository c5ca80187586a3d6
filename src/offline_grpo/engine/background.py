"""Work in daemon threads, which never keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """The future result of `call`, which runs in a thread of its own."""
    outcome: Future[T] = Future()

    outcome.set_running_or_notify_cancel()  # nobody can cancel it

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # it belongs to the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def at_once(call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The results of `call` for all items, at the same time. The first error is raised when all calls have ended."""
    return [call(items[0])] if len(items) == 1 else results(started(call, items))


def started(call: Callable[[S], T], items: Sequence[S]) -> list[Future[T]]:
    """The future results of `call` for all items, at the same time."""
    return [in_background(partial(call, item)) for item in items]


def results(outcomes: Sequence[Future[T]]) -> list[T]:
    """All of them. The first error is raised when all calls have ended."""
    wait(outcomes)
    return [outcome.result() for outcome in outcomes]


def made_once(make: Callable[[], T]) -> Callable[[], T]:
    """`functools.cache` for threads: alone it may call `make` twice if two threads come first at once."""
    making, cached = threading.Lock(), cache(make)

    def made() -> T:
        with making:
            return cached()

    return made
