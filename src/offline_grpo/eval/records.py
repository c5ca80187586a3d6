"""Results of every problem as JSON lines: one file for each model and set of problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offline_grpo.disk import utf8, write_whole
from offline_grpo.types import RolloutGroup


def record_of(index: int, group: RolloutGroup) -> dict[str, Any]:
    """One problem: prompt, reference answer, and its replicates in the order in which they were seeded."""
    problem = group.problem
    assert problem is not None
    replicates = [
        {
            "reward": rollout.score.reward,
            "is_correct": rollout.score.is_correct,
            "parts": dict(rollout.score.parts),
            "num_tokens": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
            "text": rollout.text,
        }
        for rollout in group.rollouts
    ]
    messages = [dict(message) for message in problem.messages]
    return {
        "index": index,
        "problem_id": problem.problem_id,
        "messages": messages,
        "answer": problem.answer,
        "replicates": replicates,
    }


@contextmanager
def recording(path: Path) -> Iterator[Callable[[int, RolloutGroup], None]]:
    """Yields a function that writes a problem's line as soon as it is judged; at the end lines are put in order."""
    with path.open("w", encoding="utf-8") as file:

        def add(index: int, group: RolloutGroup) -> None:
            file.write(utf8(json.dumps(record_of(index, group), ensure_ascii=False)) + "\n")
            file.flush()

        yield add
    with path.open(encoding="utf-8") as file:  # `str.splitlines` would end lines inside a text too, at U+2028
        lines = sorted(file, key=lambda line: json.loads(line)["index"])
    write_whole(path, "".join(lines))
