"""Problems from a data set, of your own or from the Hugging Face Hub: a prompt and an answer in each row."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Any, ClassVar

from offline_grpo.errors import ConfigError, require
from offline_grpo.task.answers import (
    is_answer,
    is_same_latex,
    is_same_value,
    last_boxed,
    marked_answer,
    reference_answer,
)
from offline_grpo.task.problems import HALF, is_whole
from offline_grpo.task.rewards import GIVEN, Rewards, load_rewards
from offline_grpo.task.rows import Row, RowTask, messages_or_text, shown, text_field, tools_of
from offline_grpo.types import Message, Problem, Score

ANSWER_KINDS = ("auto", "math", "text", "regex")


@dataclass(frozen=True, kw_only=True)
class Dataset(RowTask):
    r"""Rows with a prompt and an answer. `Score.parts`, unless `reward` names functions of your own:

    correct     1.0 if the completion's answer is the row's
    format      `format_weight` if there is a `\boxed{}` and it is not empty
    """

    prompt_field: str
    answer_field: str | None
    prompt_template: str | None
    answer_kind: str
    format_weight: float
    reward: Any
    group_reward: Any
    correct_threshold: float

    worker_imports: ClassVar[tuple[str, ...]] = ("math_verify",)

    def __post_init__(self) -> None:
        super().__post_init__()
        place = f"{{{self.prompt_field}}}"
        template, kinds = self.prompt_template, f"must be one of {', '.join(ANSWER_KINDS)}"
        fix = f"must contain {place}, which is replaced by the field {self.prompt_field} (task.prompt_field)"
        require(template is None or place in template, "task.prompt_template", repr(template), fix)
        require(is_whole(template), "task.prompt_template", repr(template), HALF)
        require(self.answer_kind in ANSWER_KINDS, "task.answer_kind", self.answer_kind, kinds)
        require(0 <= self.format_weight < inf, "task.format_weight", self.format_weight, "must be 0 or more")
        threshold = self.correct_threshold
        require(isfinite(threshold), "task.correct_threshold", threshold, "must be a finite number")
        has_answer = bool(self._rewards) or self.answer_field is not None
        require(has_answer, "task.answer_field", None, "name the field with the answer, or set task.reward")

    @cached_property
    def _rewards(self) -> Mapping[str, Rewards]:
        """Those of a completion, `reward`, and of its group, `group_reward`, where there are any."""
        given = {name: value for name in ("reward", "group_reward") if (value := getattr(self, name)) is not None}
        return {name: load_rewards(value, self.correct_threshold, f"task.{name}") for name, value in given.items()}

    @property
    def rewards_groups(self) -> bool:
        return "group_reward" in self._rewards

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[Score] | Awaitable[list[Score]]:
        return self._rewards["group_reward"].score_group(problem, texts)

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        """Compare the answer of a completion with the row's, or ask the reward functions."""
        if "reward" in self._rewards:
            return self._rewards["reward"].score(problem, text)
        if self.answer_field is None:
            return Score.unscored()  # the group's reward is all
        is_correct = is_right(self.answer_kind, problem.answer, text)
        parts = {"correct": float(is_correct), "format": self.format_weight if last_boxed(text) else 0.0}
        return Score(reward=sum(parts.values()), is_correct=is_correct, parts=parts)

    def problem_of(self, problem_id: str, row: Row) -> Problem:
        prompt = messages_or_text(row, self.prompt_field, "task.prompt_field")
        if isinstance(prompt, str):
            # Not str.format: templates and prompts may contain other braces.
            template = self.prompt_template
            text = prompt if template is None else template.replace(f"{{{self.prompt_field}}}", prompt)
            prompt = [{"role": "user", "content": text}]
        elif self.prompt_template is not None:
            fix = f"{row.where} has a list of messages, and no text, as prompt; set it to null"
            raise ConfigError(f"task.prompt_template={self.prompt_template!r}: {fix}")
        # The prompt and the answer too, unless reward functions are given them under these names anyway.
        given = {self.prompt_field, self.answer_field} & {*GIVEN}
        fields = {str(key): value for key, value in row.value.items() if key not in given}
        messages, tools = self.messages(row, prompt), tools_of(row)
        problem = Problem(problem_id, messages, self._answer(row), fields, tools=tools)
        for rewards in self._rewards.values():
            rewards.check(problem)
        return problem

    def asked_by(self, row: Row, problem: Problem) -> Sequence[Message]:
        prompt = messages_or_text(row, self.prompt_field, "task.prompt_field")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def _answer(self, row: Row) -> str:
        has_reward = "reward" in self._rewards
        if self.answer_field is None or (has_reward and row.value.get(self.answer_field) is None):
            return ""
        text = text_field(row, self.answer_field, "task.answer_field")
        if has_reward:
            return text
        answer = reference_answer(text) if self.answer_kind in ("auto", "math") else text.strip()
        place = f"in the field {self.answer_field!r} (task.answer_field): {shown(text)}"
        if not answer:
            raise ConfigError(f"{row.where} has no final answer {place}")
        if self.answer_kind == "regex":
            try:
                re.compile(answer)
            except re.error as error:
                raise ConfigError(f"{row.where} has no regular expression ({error}) {place}") from error
        return answer


def is_right(kind: str, reference: str, text: str) -> bool:
    """Whether a completion has the reference as its answer. Kinds: see conf/task/dataset.yaml; "math" may take for
    ever.
    """
    if kind == "regex":
        return re.search(reference, text) is not None
    if kind == "text":
        found, own = (marked_answer(each) or each for each in (text, reference))
        return text.strip() == reference or found.strip() == own.strip()
    return is_answer(reference, text, is_same_latex if kind == "math" else is_same_value)
