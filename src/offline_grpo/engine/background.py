"""Work in another thread that never keeps the process from ending."""

from __future__ import annotations

import asyncio
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
