"""Work in another thread that never keeps the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial, wraps
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """What `call` returns or raises, sooner or later."""
    outcome: Future[T] = Future()
    threading.Thread(target=_settle, args=(outcome, call), daemon=True).start()
    return outcome


def at_once(call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """What `call` returns for each item, all at the same time. The first error is raised when all have ended: nobody is
    left at work.
    """
    if len(items) == 1:
        return [call(items[0])]
    outcomes = [in_background(partial(call, item)) for item in items]
    wait(outcomes)
    return [outcome.result() for outcome in outcomes]


def made_once(make: Callable[[], T]) -> Callable[[], T]:
    """`make`, called once in the life of the process. `functools.cache` alone may call it twice, where threads are the
    first at once.
    """
    making, cached = threading.Lock(), cache(make)

    @wraps(make)
    def made() -> T:
        with making:
            return cached()

    return made


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """An event loop that runs in a thread of this name, until it is stopped."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name=name, daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # whatever it is, the thread that waits must learn of it
        outcome.set_exception(error)
