"""How far a run is: said where the work is done, heard by the run's listeners. Like logging, it needs no handle and
goes one way. Outside `followed`, and in other threads, reports are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from offline_grpo.interfaces import RunListener

LONG_S = 1.0
"""A step that took longer says how long, when it is done."""
LOG_ALONE = {"log_alone": True}
"""`extra` of a record for run.log: the screen has it already, in another form, or needs it not."""
_NOTE = "in the phase "

log = logging.getLogger(__name__)


@dataclass
class _Followed:
    began_s: float = field(default_factory=time.time)  # since the epoch
    listeners: Sequence[RunListener] = ()
    phases: list[tuple[str, int]] = field(default_factory=list)  # that are open, the innermost last
    seconds: dict[str, float] = field(default_factory=dict)  # of the start's phases


_current: ContextVar[_Followed | None] = ContextVar("followed", default=None)
_runs_of_this_process = count()


@contextmanager
def followed() -> Iterator[None]:
    """A run. The first one of a process began with the process, before its imports."""
    run = _Followed()
    if next(_runs_of_this_process) == 0:
        run.began_s = psutil.Process().create_time()
    run.seconds["imports and data"] = time.time() - run.began_s
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def tell(listeners: Sequence[RunListener]) -> None:
    """These listen from now on."""
    if (run := _current.get()) is not None:
        run.listeners = listeners


@contextmanager
def phase(name: str, iteration: int = -1) -> Iterator[None]:
    """Inside, the run is in phase `name`; afterwards in the one around it, if there is one. Iteration -1 is before the
    first. An error that leaves it says so at the end of its traceback (see `phase_of`).
    """
    run = _current.get()
    if run is None:
        yield
        return

    run.phases.append((name, iteration))
    for listener in run.listeners:
        listener.phase(name, iteration)
    began = time.perf_counter()
    try:
        yield
    except Exception as error:
        if phase_of(error) is None:
            error.add_note(f"{_NOTE}{name}" + (f", iteration {iteration + 1}" if iteration >= 0 else ""))
        raise
    finally:
        run.phases.pop()
        run.seconds[name] = run.seconds.get(name, 0.0) + time.perf_counter() - began
        for listener in run.listeners if run.phases else ():
            listener.phase(*run.phases[-1])


def phase_of(error: BaseException) -> str | None:
    """The phase that an error was raised in, such as `train, iteration 3`; None outside all of them."""
    return next((note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)), None)


@contextmanager
def step(name: str, message: str) -> Iterator[None]:
    """A phase of the start that the log has a line of, and another one at its end if it took long."""
    log.info(message)
    began = time.perf_counter()
    with phase(name):
        yield
    if (seconds := time.perf_counter() - began) > LONG_S:
        log.info("%s: done after %.1f s", name, seconds)


def report(done: int, total: int, unit: str) -> None:
    """`done` of `total` "completions", "microbatches", ... of the phase are done; `total` 0: unknown."""
    if (run := _current.get()) is not None:
        for listener in run.listeners:
            listener.progress(done, total, unit)


def elapsed_s() -> float:
    """Seconds since the run began."""
    run = _current.get()
    return 0.0 if run is None else time.time() - run.began_s


def start_metrics() -> dict[str, float]:
    """Seconds until now, when the first iteration begins, and those of each phase of the start. Logs the three phases
    that took most of it.
    """
    seconds = {} if (run := _current.get()) is None else run.seconds
    longest = sorted(seconds, key=lambda name: -seconds[name])[:3]
    parts = (f"{name} {took:.1f}" for name, took in seconds.items() if name in longest)
    log.info("ready after %.1f s: %s", elapsed_s(), ", ".join(parts))
    named = {f"time/start_{name.replace(' ', '_')}_s": took for name, took in seconds.items()}
    return {"time/start_s": elapsed_s()} | named
