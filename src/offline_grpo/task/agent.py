"""Agents of the user's own: any function that talks to the policy as a client of OpenAI's API does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from offline_grpo.interfaces import Chat
from offline_grpo.task.environment import EpisodeTask, awaited, seed_globally
from offline_grpo.task.rewards import imported, reward_parts, total
from offline_grpo.types import Problem, Score


@dataclass(frozen=True, kw_only=True)
class Agent(EpisodeTask):
    """Episodes of a function `solve(row, base_url, api_key)`, sync or async, which returns the reward, see
    `reward_parts`.
    """

    agent: str

    has_address: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._function

    @cached_property
    def _function(self) -> Any:
        return imported(self.agent, "task.agent", "function")

    def play(self, problem: Problem, chat: Chat) -> Score:
        seed_globally(chat.seed)
        reward = awaited(self._function(row=dict(problem.fields), base_url=chat.base_url, api_key=chat.api_key))
        return total(reward_parts(reward, "episode", f"task.agent={self.agent}"), self.correct_threshold)
