"""What SIGINT, SIGTERM and SIGUSR1 do, and when."""

import logging
import os
import signal
from contextlib import ExitStack

import pytest

from offline_grpo.errors import EngineError, StopRequested
from offline_grpo.history import signals
from offline_grpo.history.folder import RunDir
from offline_grpo.history.signals import StopSignal
from offline_grpo.run import ending
from offline_grpo.state import Run


@pytest.fixture(autouse=True)
def dispositions():
    """Those of a program in a terminal; what starts the tests may ignore SIGINT, as `nohup ... &` does."""
    before = {number: signal.getsignal(number) for number in signals.HANDLED}
    for number in signals.HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def said():
    """The messages that the package logs."""
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


@pytest.mark.parametrize(
    ("number", "exit_code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGUSR1, 138, "SIGUSR1")],
)
def test_a_signal_stops_at_once_and_says_so(number, exit_code, name, said):
    with StopSignal.listening(), pytest.raises(StopRequested) as caught:
        send(number)
        pytest.fail("went on")
    assert caught.value.exit_code == exit_code
    assert said == [f"{name}: stopping"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_held_work_is_waited_for_and_named(said):
    with StopSignal.listening() as stop, stop.held("this iteration"):
        send(signal.SIGINT)
        assert stop.number == signal.SIGINT
        with stop.interruptible(allowed=False):  # several processes
            pass
        with pytest.raises(StopRequested), stop.interruptible():
            pytest.fail("entered")
    assert said == ["Ctrl-C: stopping after this iteration; a second one ends it at once"]


def test_a_signal_does_not_take_the_place_of_an_error(said, tmp_path):
    """Servers take seconds to stop, and the error is reported after that."""
    with StopSignal.listening() as stop, pytest.raises(EngineError, match="other weights"):
        run = Run(stop, ExitStack())
        run.folder = RunDir(tmp_path)
        run.stack.callback(send, signal.SIGINT)
        with ending(run), stop.held("this iteration"):
            raise EngineError("the server has other weights")


def test_the_second_signal_ends_the_process_but_not_the_same_one_passed_on(monkeypatch):
    monkeypatch.setattr(signals, "REPEAT_S", 60)
    with StopSignal.listening() as stop, stop.held("it"):
        send(signal.SIGINT)
        send(signal.SIGINT)  # by torchrun, which got the Ctrl-C too
        monkeypatch.setattr(signals, "REPEAT_S", 0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignal.listening() as stop, stop.held("it"):
        send(signal.SIGINT)
        assert stop.number is None
        send(signal.SIGTERM)
        assert stop.number is not None
        send(signal.SIGINT)  # would end the process if it had been given a handler or the default
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
