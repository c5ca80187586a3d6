"""Calls that are made at the same time."""

from __future__ import annotations

import threading
import time

import pytest

from offline_grpo.engine.streaming import at_once


def test_calls_overlap_and_keep_their_order() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(number: int) -> int:
        both.wait()
        return number

    assert at_once(meet, [2, 1]) == [2, 1]


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = []

    def work(number: int) -> None:
        if number < 2:
            raise ValueError(number)
        time.sleep(0.2)
        ended.append(number)

    with pytest.raises(ValueError, match=r"^0$"):
        at_once(work, range(4))
    assert sorted(ended) == [2, 3]
