"""A task whose completions are scored elsewhere than in the run's process."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from offline_grpo.generation.judging import about_completion
from offline_grpo.interfaces import Task
from offline_grpo.settings import ScoringConfig
from offline_grpo.types import Problem, Score, Split

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 10.0
"""How often the files of rewards are looked at."""
NUM_JUDGED = 500
"""Of so many completions none being correct is told, with the threshold."""


class Asked(Protocol):
    """Processes of this machine (`pool.py`), or of a cluster (`cluster.py`), that score."""

    async def answer(self, problem: Problem, text: str) -> dict[str, Any]: ...
    def close(self) -> None: ...


class IsolatedTask:
    """A `Task` like `task`, whose `score` is async and asks `scorers`.

    Code that takes longer than `timeout_s`, needs more than `memory_mib`, ends its process or raises costs a score of 0
    that says so (`Score.failure`), or less, see `judging.scores_of`. The first failure of each cause is logged.
    """

    def __init__(self, task: Task, scorers: Asked, settings: ScoringConfig) -> None:
        self._task, self._scorers, self._settings = task, scorers, settings
        self._logged: set[str] = set()
        self._code = {file: file.stat().st_mtime_ns for file in getattr(task, "code_files", ())}
        self._looked_s = time.monotonic()
        self._threshold = task.correct_threshold if getattr(task, "reward", None) else None  # type: ignore[attr-defined]
        self._num_wrong, self._highest = 0, -math.inf  # up to the first that is correct

    def problems(self, split: Split) -> Sequence[Problem]:
        """See `Task.problems`."""
        return self._task.problems(split)

    async def score(self, problem: Problem, text: str) -> Score:
        """See `Task.score`. Raises ScoreError as `Scorers.answer` does."""
        if time.monotonic() - self._looked_s >= LOOK_INTERVAL_S:
            self._warn_of_edits()
        answer = await self._scorers.answer(problem, text)
        if failure := answer.get("failure"):
            self._warn_of_failure(failure, answer, problem, text)
            return Score(0.0, False, {}, failure)
        score = Score(answer["reward"], answer["is_correct"], answer["parts"], measured=answer["measured"])
        if self._threshold is not None:
            self._check_threshold(score)
        return score

    def close(self) -> None:
        """End all processes that score."""
        self._scorers.close()

    def _warn_of_edits(self) -> None:
        """Once for each file. Workers import it when they start, at any time: the process that forks them must not run
        foreign code.
        """
        self._looked_s = time.monotonic()
        for file in [
            file for file, time_ns in self._code.items() if file.exists() and file.stat().st_mtime_ns != time_ns
        ]:
            del self._code[file]
            log.warning(
                "task.reward: %s has been edited since the run was started: processes that score use the new "
                "text if they start from now "
                "on, the others the old one. Stop the run and resume it, so that all use the new one",
                file,
            )

    def _check_threshold(self, score: Score) -> None:
        self._num_wrong, self._highest = self._num_wrong + 1, max(self._highest, score.reward)
        if score.is_correct:
            self._threshold = None
        elif self._num_wrong == NUM_JUDGED:
            log.warning(
                "none of the first %d completions counts as correct: the highest reward was %g, and "
                "task.correct_threshold=%g",
                NUM_JUDGED,
                self._highest,
                self._threshold,
            )

    def _warn_of_failure(self, failure: str, answer: dict[str, Any], problem: Problem, text: str) -> None:
        if failure in self._logged:
            return
        self._logged.add(failure)
        what = {
            "timeout": f"took more than {self._settings.timeout_s:g} s (scoring.timeout_s)",
            "memory": f"needed more than {self._settings.memory_mib} MiB (scoring.memory_mib)",
            "crashed": f"killed its process {answer['reason']}".rstrip(),
            "raised": f"failed: {answer['reason']}",
        }[failure]
        log.warning(
            "the code that scores %s; %s. It got the reward 0, or the least of its group if that is below 0, as "
            "all will that fail like "
            "this: scoring/num_failed_%s counts them.%s",
            what,
            about_completion(problem, text),
            failure,
            f"\n{answer['traceback'].rstrip()}" if answer["traceback"] else "",
        )
