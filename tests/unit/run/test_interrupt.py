"""What SIGINT and SIGTERM do, and when."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

from offline_grpo.errors import EngineError, StopRequested
from offline_grpo.run import interrupt
from offline_grpo.run.app import ended_whole
from offline_grpo.run.interrupt import StopSignal
from offline_grpo.run.log_outputs import kept_for_log


@pytest.fixture(autouse=True)
def dispositions():
    """Those of a program in a terminal; what starts the tests may ignore SIGINT, as `nohup ... &` does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def said():
    """What the package logs."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, package = Lines(), logging.getLogger("offline_grpo")
    package.addHandler(handler)
    yield lines
    package.removeHandler(handler)


def send(number):
    os.kill(os.getpid(), number)


def test_a_signal_does_not_take_the_place_of_an_error(said):
    """Servers take seconds to stop, and the error is told after that."""
    stop = StopSignal()
    with stop.installed(), pytest.raises(EngineError, match="other weights"), ExitStack() as stack:
        stack.callback(send, signal.SIGINT)
        with ended_whole(stop), stop.held("the start of the loop"):
            raise EngineError("the server has other weights")
    assert said == ["Ctrl-C: stopping after the end of what the run has started; a second one ends it at once"]


@pytest.mark.parametrize(
    ("number", "exit_code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_stops_at_once_and_says_so(number, exit_code, name, said):
    stop = StopSignal()
    with stop.installed(), pytest.raises(StopRequested) as caught:
        send(number)
        pytest.fail("went on")
    assert caught.value.exit_code == exit_code
    assert said == [f"{name}: stopping"]


def test_before_the_log_of_the_run_is_there_the_line_goes_to_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("offline_grpo"), "handlers", [])  # those of the tests
    with kept_for_log(), StopSignal().installed(), pytest.raises(StopRequested):
        send(signal.SIGTERM)
    assert capsys.readouterr().err == "SIGTERM: stopping\n"


def test_held_work_is_waited_for_and_named(said):
    stop = StopSignal()
    with stop.installed(), stop.held("the start"):
        stop.hold("the updates of iteration 3")
        send(signal.SIGINT)
        assert stop.number is not None
        with pytest.raises(StopRequested):
            stop.check()
    assert said == ["Ctrl-C: stopping after the updates of iteration 3; a second one ends it at once"]


def test_a_signal_is_acknowledged_while_the_main_thread_is_busy_outside_of_python(said):
    libc = ctypes.CDLL(None)
    taken, mutex = threading.Event(), ctypes.create_string_buffer(64)  # of zeros, which are a mutex that nobody has
    said_meanwhile = []

    def send_and_look():
        libc.pthread_mutex_lock(mutex)
        taken.set()
        time.sleep(
            0.1
        )  # until the main thread waits for the mutex, which it does as long as a backward pass may take, or longer
        send(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.005)
        said_meanwhile.extend(said)
        libc.pthread_mutex_unlock(mutex)

    stop = StopSignal()
    with stop.installed(), stop.held("the lock"):
        sender = threading.Thread(target=send_and_look, daemon=True)
        sender.start()
        assert taken.wait(20)
        libc.pthread_mutex_lock(mutex)
        sender.join()
    assert said_meanwhile == said == ["SIGTERM: stopping after the lock; a second one ends it at once"]


def test_interruptible_parts_of_held_work_are_cut_short():
    stop, reached = StopSignal(), []
    with stop.installed(), stop.held("it"), pytest.raises(StopRequested), stop.interruptible():
        send(signal.SIGTERM)
        reached.append("the next line")
    assert reached == []


def test_parts_that_may_not_be_cut_short_are_held(said):
    stop = StopSignal()
    with stop.installed(), stop.held("it"), stop.interruptible(allowed=False):
        send(signal.SIGTERM)
    assert stop.number is not None


def test_a_signal_from_before_stops_interruptible_code_at_its_door():
    stop = StopSignal()
    with stop.installed(), stop.held("it"):
        send(signal.SIGTERM)
        with pytest.raises(StopRequested), stop.interruptible():
            pytest.fail("entered")


def test_the_second_signal_acts_as_if_nobody_listened_but_not_the_same_one_passed_on(monkeypatch):
    stop = StopSignal()
    monkeypatch.setattr(interrupt, "REPEAT_S", 60)
    with stop.installed(), stop.held("it"):
        send(signal.SIGINT)
        send(signal.SIGINT)  # by torchrun, which got the Ctrl-C too
        monkeypatch.setattr(interrupt, "REPEAT_S", 0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal().installed():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_handler_serves_the_process():
    with StopSignal.listening() as outer, StopSignal.listening() as inner:
        assert inner is outer
    with StopSignal.listening() as later:
        assert later is not outer


@pytest.mark.parametrize(("ignored", "other"), [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_an_ignored_signal_stays_ignored(ignored, other):
    signal.signal(ignored, signal.SIG_IGN)
    stop = StopSignal()
    with stop.installed(), stop.held("it"):
        with stop.interruptible():
            send(ignored)
        assert stop.number is None
        send(other)
        assert stop.number is not None
        send(ignored)  # would end the process if it had been given a handler or the default
    assert signal.getsignal(ignored) is signal.SIG_IGN


def test_after_a_complete_run_a_signal_is_only_taken_note_of():
    stop = StopSignal()
    with stop.installed():
        with stop.held("the start"):
            stop.complete("the report")
        send(signal.SIGTERM)
        assert stop.number is not None
        with pytest.raises(StopRequested):
            stop.begin()
            stop.check()


def test_a_signal_does_not_change_the_exit_code_of_a_process_that_is_ending():
    code = """
        import atexit, os, signal
        from offline_grpo.run import cli
        for number in (signal.SIGINT, signal.SIGTERM):
            atexit.register(os.kill, os.getpid(), number)
        cli.exit_with(lambda: None)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_before_anything_listens_is_one_line():
    program = (
        "import os, signal; signal.signal(2, signal.default_int_handler)\n"
        "from offline_grpo.run.interrupt import end_at_once; end_at_once(); os.kill(os.getpid(), 2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.split("\n") == ["", "stopped before the run began; nothing was saved", ""]


def test_a_launcher_that_ends_before_the_thread_that_looks_has_begun_is_missed(said, monkeypatch):
    """The process belongs to whoever has adopted it by then."""
    monkeypatch.setattr(interrupt, "LOOK_S", 0.01)
    monkeypatch.setattr(os, "getppid", lambda: 4711 if threading.current_thread() is threading.main_thread() else 1)
    with StopSignal().installed():
        assert _wait_for(lambda: said) == [
            f"the process that launched this one (4711) has ended; `kill -INT {os.getpid()}` stops this one"
        ]


@pytest.mark.slow
def test_a_process_whose_launcher_is_killed_says_so_once_and_goes_on(tmp_path):
    code = (
        "import time; from offline_grpo.run.interrupt import StopSignal\nwith StopSignal.listening():\n  time.sleep(60)"
    )
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with (tmp_path / "said").open("wb") as output:
        launcher = subprocess.Popen([sys.executable, "-c", starts], stderr=output)
    [child] = _wait_for(lambda: [process for process in psutil.Process(launcher.pid).children() if _listens(process)])
    launcher.kill()
    launcher.wait()
    line = f"the process that launched this one ({launcher.pid}) has ended; `kill -INT {child.pid}` stops this one\n"
    assert _wait_for((tmp_path / "said").read_text) == line
    time.sleep(2 * interrupt.LOOK_S)
    assert child.is_running()
    child.send_signal(signal.SIGINT)
    child.wait(20)
    assert (tmp_path / "said").read_text().startswith(f"{line}Ctrl-C: stopping\n")


def _listens(process):
    with open(f"/proc/{process.pid}/status") as file:
        caught = int(next(line.split()[1] for line in file if line.startswith("SigCgt")), 16)
    return caught >> (signal.SIGTERM - 1) & 1


def _wait_for(something):
    deadline = time.monotonic() + 30
    while not (found := something()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
