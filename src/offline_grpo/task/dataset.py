"""Problems from a data set, of your own or from the Hugging Face Hub: a prompt and an answer in each row."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Annotated, Any, ClassVar

from offline_grpo.errors import ConfigError
from offline_grpo.settings import Range, one_of
from offline_grpo.task.answers import is_answer, last_boxed, marked_answer, reference_answer
from offline_grpo.task.problems import HALF, Weight, is_whole
from offline_grpo.task.rewards import GIVEN, Rewards, load_rewards
from offline_grpo.task.rows import (
    Row,
    RowTask,
    messages_or_text,
    shown,
    text_field,
    tools_of,
    with_pictures_of,
    without_bytes,
)
from offline_grpo.types import Message, Problem, Score


@dataclass(frozen=True, kw_only=True)
class Dataset(RowTask):
    r"""Rows with a prompt and an answer. `Score.parts`, unless `reward` names functions of your own:

    correct     1.0 if the completion's answer is the row's
    format      `format_weight` if there is a `\boxed{}` and it is not empty
    """

    prompt_field: str
    answer_field: str | None
    image_field: str | None
    prompt_template: Annotated[str | None, Range(HALF, is_whole)]
    answer_kind: Annotated[str, one_of("auto", "math", "text", "regex")]
    format_weight: Weight
    reward: Any
    group_reward: Any
    correct_threshold: Annotated[float, Range("must be a finite number", isfinite)]

    worker_imports: ClassVar[tuple[str, ...]] = ("math_verify",)

    def __post_init__(self) -> None:
        super().__post_init__()
        place, template = f"{{{self.prompt_field}}}", self.prompt_template
        fix = f"must contain {place}, which is replaced by the field {self.prompt_field} (task.prompt_field)"
        self.check("prompt_template", template is None or place in template, fix)
        has_answer = bool(self.rewards) or self.answer_field is not None
        self.check("answer_field", has_answer, "name the field with the answer, or set task.reward")

    @cached_property
    def rewards(self) -> Mapping[str, Rewards]:
        """Those of a completion, `reward`, and of its group, `group_reward`, where there are any."""
        given = {name: value for name in ("reward", "group_reward") if (value := getattr(self, name)) is not None}
        return {name: load_rewards(value, self.correct_threshold, f"task.{name}") for name, value in given.items()}

    @property
    def rewards_groups(self) -> bool:
        return "group_reward" in self.rewards

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[Score] | Awaitable[list[Score]]:
        return self.rewards["group_reward"].score_group(problem, texts)

    def score(self, problem: Problem, text: str) -> Score | Awaitable[Score]:
        """Compare the answer of a completion with the row's, or ask the reward functions."""
        if "reward" in self.rewards:
            return self.rewards["reward"].score(problem, text)
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
        given = ({self.prompt_field, self.answer_field} & {*GIVEN}) | {self.image_field}
        fields = {key: value for key, value in without_bytes(row.value).items() if key not in given}
        # The answer: reward functions get it as it is, if there is one; otherwise it is what completions must have.
        answer, name, has_reward = "", self.answer_field, "reward" in self.rewards
        if name is not None and not (has_reward and row.value.get(name) is None):
            answer = text_field(row, name, "task.answer_field")
        if name is not None and not has_reward:
            place = f"in the field {name!r} (task.answer_field): {shown(answer)}"
            answer = reference_answer(answer) if self.answer_kind in ("auto", "math") else answer.strip()
            if not answer:
                raise ConfigError(f"{row.where} has no final answer {place}")
            try:
                re.compile(answer if self.answer_kind == "regex" else "")
            except re.error as error:
                raise ConfigError(f"{row.where} has no regular expression ({error}) {place}") from error
        prompt, pictures = with_pictures_of(row, prompt, self.image_field, self.folder)
        messages, tools = self.messages(row, prompt), tools_of(row)
        problem = Problem(problem_id, messages, answer, fields, tools=tools, pictures=pictures)
        for rewards in self.rewards.values():
            rewards.check(problem)
        return problem

    def asked_by(self, row: Row, problem: Problem) -> Sequence[Message]:
        prompt = messages_or_text(row, self.prompt_field, "task.prompt_field")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def is_right(kind: str, reference: str, text: str) -> bool:
    """Whether a completion has the reference as its answer. Kinds: see conf/task/dataset.yaml; "math" may take for
    ever.
    """
    if kind == "regex":
        return re.search(reference, text) is not None
    if kind == "text":
        found, own = (marked_answer(each) or each for each in (text, reference))
        return text.strip() == reference or found.strip() == own.strip()
    return is_answer(reference, text, any_latex=kind == "math")
