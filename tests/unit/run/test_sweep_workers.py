"""Signals, and the end of a sweep's process, reach the jobs that joblib runs for it; real processes, without a
training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

SWEEP = """
import time
from pathlib import Path

from joblib import Parallel, delayed

from offline_grpo.errors import StopRequested
from offline_grpo.run import sweeps
from offline_grpo.run.signals import StopSignal


def job(number):
    begun = Path(f"begun_{number}")
    while Path("slow_start").exists():
        Path(f"starting_{number}").touch()
        time.sleep(0.05)
    with sweeps.working(), StopSignal.listening() as stop:
        try:
            stop.check()
            begun.touch()
            with stop.held("the step"):
                while True:
                    time.sleep(0.05)
                    if stop.number is not None and Path("busy").exists():
                        sum(range(10**8))  # no handler of a signal runs meanwhile
                    if not Path("stuck").exists():
                        stop.check()
        except StopRequested as error:
            if begun.exists():
                Path(f"saved_{number}").write_text(error.signal_name)
            return error.signal_name


with StopSignal.listening() as stop, stop.held("the running jobs have saved"), sweeps.passing_on(stop):
    print("started", flush=True)
    print(*Parallel(n_jobs=2, backend="loky")(delayed(job)(number) for number in range(5)))
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Five jobs without end, two at a time, in a session of their own."""
    (tmp_path / "sweep.py").write_text(SWEEP)
    with subprocess.Popen(
        [sys.executable, "sweep.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # a shell's `&` makes the tests ignore it
    ) as process:
        yield process
        for pid in of_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def of_session(leader: int) -> list[int]:
    """All processes of the session, those included that are in other groups."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            found += [pid] if os.getsid(pid) == leader else []
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_two(folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("begun_*"))) == 2)


@pytest.mark.parametrize(("send", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_running_jobs_save_and_others_do_not_begin(
    send: Callable[[int, int], None], number: signal.Signals, sweep: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Whether the sweep's process alone gets the signal, or all of its group, as from a terminal."""
    wait_for_two(tmp_path)
    send(sweep.pid, number)
    printed = sweep.communicate(timeout=60)[0]
    assert sweep.returncode == 0, printed
    assert printed.splitlines()[-1] == " ".join([number.name] * 5)
    assert "Traceback" not in printed
    assert sorted(path.name for path in tmp_path.glob("*_*")) == ["begun_0", "begun_1", "saved_0", "saved_1"]


@pytest.mark.slow
def test_a_ctrl_c_is_one_signal_to_a_busy_worker(sweep: subprocess.Popen[str], tmp_path: Path) -> None:
    """One that the terminal sends and one that the sweep passes on would be two, the second of which ends a run at
    once.
    """
    (tmp_path / "busy").touch()
    wait_for_two(tmp_path)
    os.killpg(sweep.pid, signal.SIGINT)
    printed = sweep.communicate(timeout=120)[0]
    assert printed.splitlines()[-1] == "SIGINT SIGINT SIGINT SIGINT SIGINT"
    assert len(list(tmp_path.glob("saved_*"))) == 2


def test_a_signal_while_the_workers_start_is_no_traceback(sweep: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_until(lambda: len(of_session(sweep.pid)) > 3)  # two of them trackers of resources
    os.killpg(sweep.pid, signal.SIGINT)
    printed = sweep.communicate(timeout=60)[0]
    assert sweep.returncode == 0, printed
    assert printed.splitlines()[-1] == "SIGINT SIGINT SIGINT SIGINT SIGINT"
    assert "Traceback" not in printed
    assert len(list(tmp_path.glob("begun_*"))) == len(list(tmp_path.glob("saved_*")))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once(sweep: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "stuck").touch()
    wait_for_two(tmp_path)
    os.killpg(sweep.pid, signal.SIGINT)
    time.sleep(1.5)
    assert sweep.poll() is None
    os.killpg(sweep.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in sweep.communicate(timeout=30)[0]
    assert not list(tmp_path.glob("saved_*"))
    wait_until(lambda: not of_session(sweep.pid))


@pytest.mark.slow
def test_jobs_save_and_workers_end_when_the_process_of_the_sweep_is_killed(
    sweep: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for_two(tmp_path)
    sweep.kill()
    wait_until(lambda: not [pid for pid in of_session(sweep.pid) if pid != sweep.pid])
    assert [path.read_text() for path in sorted(tmp_path.glob("saved_*"))] == ["SIGTERM", "SIGTERM"]
    assert len(list(tmp_path.glob("begun_*"))) == 2


def test_no_job_begins_once_the_process_of_the_sweep_has_been_killed(
    sweep: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "slow_start").touch()
    wait_until(lambda: len(list(tmp_path.glob("starting_*"))) == 2)
    sweep.kill()
    sweep.wait()
    (tmp_path / "slow_start").unlink()
    wait_until(lambda: not of_session(sweep.pid))
    assert not list(tmp_path.glob("begun_*"))
