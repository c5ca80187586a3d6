"""For test_processes.py: what a process of a group does there."""

from __future__ import annotations

from pathlib import Path

from offline_grpo.errors import EngineDied, EngineError, GrpoError
from offline_grpo.placement.ranks import Ranks


def one_fails(folder: str) -> None:
    """Write what this process hears when it or the other one fails."""
    ranks = Ranks(use_cpu=True)

    def work(*errors: GrpoError | None) -> list[int]:
        error = errors[ranks.rank]
        if error is not None:
            raise error
        return [ranks.rank * 10, ranks.rank * 10 + 1]

    heard: list[object] = [
        ranks.gather_results(lambda: work(None, None)),
        ranks.gather_interleaved(lambda: work(None, None)),
    ]
    for errors in (
        (None, EngineError("late")),
        (EngineError("early"), EngineDied("gone")),
        (EngineError("first"), EngineError("second")),
    ):
        try:
            heard.append(ranks.gather_results(lambda errors=errors: work(*errors)))
        except EngineError as error:
            heard.append(repr(error))
    Path(folder, str(ranks.rank)).write_text(repr(heard))
