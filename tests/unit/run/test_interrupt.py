"""What SIGINT and SIGTERM do, and when."""

import os
import signal

import pytest

from offline_grpo.errors import StopRequested
from offline_grpo.run.interrupt import StopSignal


@pytest.fixture(autouse=True)
def dispositions():
    """Those of a program in a terminal; what starts the tests may ignore SIGINT, as `nohup ... &` does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_for_the_next_check(number, exit_code):
    stop = StopSignal()
    with stop.installed():
        stop.check()
        send(number)
        assert stop.is_requested
        with pytest.raises(StopRequested) as caught:
            stop.check()
    assert caught.value.exit_code == exit_code


def test_interruptible_code_is_cut_short():
    stop, reached = StopSignal(), []
    with stop.installed(), pytest.raises(StopRequested), stop.interruptible():
        send(signal.SIGTERM)
        reached.append("the next line")
    assert reached == []


def test_a_signal_from_before_stops_interruptible_code_at_its_door():
    stop = StopSignal()
    with stop.installed():
        send(signal.SIGTERM)
        with pytest.raises(StopRequested), stop.interruptible():
            pytest.fail("entered")


def test_the_second_signal_acts_as_if_nobody_listened():
    stop = StopSignal()
    with stop.installed():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal().installed():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("ignored", "other"), [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_an_ignored_signal_stays_ignored(ignored, other):
    signal.signal(ignored, signal.SIG_IGN)
    stop = StopSignal()
    with stop.installed():
        with stop.interruptible():
            send(ignored)
        assert not stop.is_requested
        send(other)
        assert stop.is_requested
        send(ignored)  # would end the process if it had been given a handler or the default
    assert signal.getsignal(ignored) is signal.SIG_IGN
