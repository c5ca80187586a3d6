"""A task whose completions are scored elsewhere than in the run's process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from offline_grpo.generation.judging import about_completion
from offline_grpo.interfaces import Task
from offline_grpo.settings import ScoringConfig
from offline_grpo.types import Problem, Score, Split

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 10.0
"""How often the code of rewards is compared with what it was."""


class Asked(Protocol):
    """Those that score: processes of this machine (`scorers.py`), or of a cluster (`cluster.py`)."""

    async def answer(self, problem: Problem, text: str) -> dict[str, Any]:
        """See `Scorers.answer`."""
        ...

    def close(self) -> None:
        """End all processes of it."""
        ...


class IsolatedTask:
    """A `Task` like `task`, whose `score` is async and asks `scorers`.

    Code that takes longer than `timeout_s`, needs more than `memory_mib`, ends its process or raises costs a score of 0
    that says so (`Score.failure`), or less, see `judging.scores_of`; of each cause the first one is told.
    """

    def __init__(self, task: Task, scorers: Asked, settings: ScoringConfig) -> None:
        self._task, self._scorers, self._settings = task, scorers, settings
        self._told: set[str] = set()
        self._code = {file: _content(file) for file in getattr(task, "code_files", ())}
        self._looked_s = time.monotonic()

    def problems(self, split: Split) -> Sequence[Problem]:
        """See `Task.problems`."""
        return self._task.problems(split)

    async def score(self, problem: Problem, text: str) -> Score:
        """See `Task.score`. Raises ScoreError as `Scorers.answer` does."""
        if time.monotonic() - self._looked_s >= LOOK_INTERVAL_S:
            self._tell_of_edits()
        answer = await self._scorers.answer(problem, text)
        if failure := answer.get("failure"):
            self._tell(failure, answer, problem, text)
            return Score(0.0, False, {}, failure)
        return Score(answer["reward"], answer["is_correct"], answer["parts"], measured=answer["measured"])

    def close(self) -> None:
        """End all processes that score."""
        self._scorers.close()

    def _tell_of_edits(self) -> None:
        """Each file once. Processes that score import it when they start, at any time: the one that forks them must not
        (see `host.py`).
        """
        self._looked_s = time.monotonic()
        for file in [file for file, content in self._code.items() if _content(file) != content]:
            del self._code[file]
            log.warning(
                "task.reward: %s has been edited since the run was started; processes that score use the new text if they start from now "
                "on, and the others the old one: put that back, or stop the run and go on with resume, so that all use the new one",
                file,
            )

    def _tell(self, failure: str, answer: dict[str, Any], problem: Problem, text: str) -> None:
        """The first one of each cause, as loud as a warning is."""
        if failure in self._told:
            return
        self._told.add(failure)
        what = {
            "timeout": f"took more than {self._settings.timeout_s:g} s (scoring.timeout_s)",
            "memory": f"needed more than {self._settings.memory_mib} MiB (scoring.memory_mib)",
            "crashed": f"killed its process ({answer['reason']})",
            "raised": f"failed: {answer['reason']}",
        }[failure]
        log.warning(
            "the code that scores %s; %s. It got the reward 0, or the least of its group if that is below 0, as all will that fail like "
            "this: scoring/num_failed_%s counts them.%s",
            what,
            about_completion(problem, text),
            failure,
            f"\n{answer['traceback'].rstrip()}" if answer["traceback"] else "",
        )


def _content(file: Path) -> bytes | None:
    """None where it cannot be read, as in the moment in which an editor replaces it."""
    try:
        return file.read_bytes()
    except OSError:
        return None
