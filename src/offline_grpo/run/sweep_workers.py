"""Signals in a sweep whose jobs run in other processes of this machine (`hydra/launcher=joblib`).

The sweep's process passes a signal on to each worker once, so that the job there saves. A worker ends with the sweep's
process.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from offline_grpo.run.interrupt import HANDLED, StopSignal

POLL_S = 0.1

log = logging.getLogger(__name__)

_of_this_worker = ExitStack()
_job = threading.Lock()
"""Held while this worker runs a job."""


def sweep_process() -> int | None:
    """Of the sweep whose jobs this process runs; None in all processes that joblib has not started."""
    parent = multiprocessing.parent_process()
    is_worker = type(multiprocessing.current_process()).__module__.startswith("joblib.")
    return parent.pid if parent is not None and is_worker else None


@contextmanager
def passing_on(stop: StopSignal) -> Iterator[None]:
    """In the sweep's process, while its workers run: they get the signal that `stop` has received, also those that
    start after it.

    They start with signals blocked, and `working` lets them in: before that Python would end a worker with a traceback.
    Signals to this process arrive in its other threads.
    """
    from multiprocessing import resource_tracker

    from joblib.externals.loky.backend import resource_tracker as tracker_of_joblib

    for tracker in (resource_tracker, tracker_of_joblib):  # their start would let signals in again
        tracker.ensure_running()
    has_ended = threading.Event()
    thread = threading.Thread(target=_pass_on, args=(stop, has_ended), name="passes signals on", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(stop: StopSignal, has_ended: threading.Event) -> None:
    told: set[int | None] = set()
    while not has_ended.wait(POLL_S):
        if stop.number is None:
            continue
        for worker in multiprocessing.active_children():
            if worker.pid is not None and worker.pid not in told:
                told.add(worker.pid)
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, stop.number)


@contextmanager
def working() -> Iterator[None]:
    """For a job. In a worker, a signal that came before it is not forgotten, and the worker ends if the sweep's process
    has ended.
    """
    sweep = sweep_process()
    if sweep is None:
        yield
        return
    with _job:
        if StopSignal.current() is None:
            _listen()
        if os.getppid() != sweep:
            _end()
        try:
            yield
        finally:
            if os.getppid() != sweep:
                _end()  # here, because joblib would try to hand on the job's result


def _listen() -> None:
    """From the first job of this worker to its end."""
    os.setpgid(
        0, 0
    )  # a terminal sends a Ctrl-C to the sweep's process group: the worker gets it from there alone, once
    stop = _of_this_worker.enter_context(StopSignal.listening())
    atexit.register(_of_this_worker.close)
    stop.hold("this step of the sweep")
    stop.left_alone = _left_alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def _left_alone(stop: StopSignal, sweep: int) -> None:
    """The sweep's process was killed: the job here saves and ends, if there is one."""
    if _job.locked():
        log.warning("the sweep's process (%d) has ended, and so does this run", sweep)
    if stop.number is None:
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_end_when_idle, daemon=True).start()


def _end_when_idle() -> None:
    with _job:
        _end()


def _end() -> None:
    """At once, because joblib would wait for the next job."""
    os._exit(128 + signal.SIGTERM)
