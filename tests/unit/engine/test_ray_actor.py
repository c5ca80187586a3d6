"""What is said of an actor that Ray has lost, from the words of Ray 2.60."""

from __future__ import annotations

import pytest

from offline_grpo.engine.ray_actor import fate

KILLED = (
    "The actor died unexpectedly before finishing this task.\nThe actor is dead because its worker process has died."
)
KILLED += " Worker exit type: SYSTEM_ERROR [...] consider isolation to prevent node deaths by resource contention"
LOST = (
    "The actor died unexpectedly before finishing this task.\nThe actor died because its node has died. Node Id: c676"
)
NOT_THERE = "The actor is not schedulable: The node specified via NodeAffinitySchedulingStrategy doesn't exist any more"


@pytest.mark.parametrize(
    ("words", "expected"),
    [(KILLED, "has lost the process that Ray started there"), (LOST, "has gone"), (NOT_THERE, "has gone")],
)
def test_a_process_that_was_killed_is_no_lost_machine(words: str, expected: str) -> None:
    assert fate(RuntimeError(words)) == expected
