"""Connections to servers, as all calls of a process share them."""

from __future__ import annotations

import runpy
import time
from typing import Any

from offline_grpo.engine import http
from offline_grpo.engine.background import at_once


def test_threads_that_make_the_first_calls_at_once_share_a_loop() -> None:
    """As the first push to several servers does: a connection that one of them opens is of no use in another loop."""
    made: list[str] = []

    def start_slowly(name: str) -> object:
        time.sleep(0.05)
        made.append(name)
        return object()

    module: Any = runpy.run_path(http.__file__)["exchange"].__globals__  # of a process that has made no call
    module["start_loop"] = start_slowly
    loops = at_once(lambda _: module["_control_loop"](), range(4))
    assert len(made) == len(set(loops)) == 1
