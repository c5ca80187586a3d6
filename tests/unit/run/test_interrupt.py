"""What SIGINT and SIGTERM do, and when."""

import os
import signal

import pytest

from offline_grpo.errors import StopRequested
from offline_grpo.run.interrupt import StopSignal


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
