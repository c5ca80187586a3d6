"""A task whose completions are scored elsewhere than in the run's process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from offline_grpo.generation.judging import about_completion
from offline_grpo.interfaces import Task
from offline_grpo.settings import ScoringConfig
from offline_grpo.types import Problem, Score, Split

log = logging.getLogger(__name__)


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

    def problems(self, split: Split) -> Sequence[Problem]:
        """See `Task.problems`."""
        return self._task.problems(split)

    async def score(self, problem: Problem, text: str) -> Score:
        """See `Task.score`. Raises ScoreError as `Scorers.answer` does."""
        answer = await self._scorers.answer(problem, text)
        if failure := answer.get("failure"):
            self._warn(failure, answer, problem, text)
            return Score(0.0, False, {}, failure)
        return Score(answer["reward"], answer["is_correct"], answer["parts"], measured=answer["measured"])

    def close(self) -> None:
        """End all processes that score."""
        self._scorers.close()

    def _warn(self, failure: str, answer: dict[str, Any], problem: Problem, text: str) -> None:
        if failure in self._logged:
            return
        self._logged.add(failure)
        reason = {
            "timeout": f"took more than {self._settings.timeout_s:g} s (scoring.timeout_s)",
            "memory": f"needed more than {self._settings.memory_mib} MiB (scoring.memory_mib)",
            "crashed": f"killed its process {answer['reason']}".rstrip(),
            "raised": f"failed: {answer['reason']}",
        }[failure]
        log.warning(
            "the code that scores %s; %s. Such completions get the reward 0, or the least of their group if that is "
            "below 0: scoring/num_failed_%s counts them.%s",
            *(reason, about_completion(problem, text), failure),
            f"\n{answer['traceback'].rstrip()}" if answer["traceback"] else "",
        )
