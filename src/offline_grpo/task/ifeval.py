"""Following instructions that a program can check: the data set google/IFEval, others in its form, and a small one that
comes along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from offline_grpo.errors import ConfigError, require
from offline_grpo.task.answers import tagged_blocks
from offline_grpo.task.instructions import CHECKS, follows, problem_with, variants
from offline_grpo.task.rows import Row, RowTask, field, shown, text_field
from offline_grpo.types import Problem, Score

MEASURES = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")


@dataclass(frozen=True, kw_only=True)
class IFEval(RowTask):
    """Prompts with instructions; rows have `prompt`, `instruction_id_list` and `kwargs` (the arguments of each
    instruction). The parts of the reward, each times its weight:

        prompt_strict       1 if the response follows all instructions; such a completion counts as correct
        instruction_strict  the share of the instructions that it follows
        prompt_loose        as prompt_strict; an instruction counts as followed if one of the response's `variants`
                            follows it
        instruction_loose   the share of these
        answer, think       `answer_bonus` and `think_bonus`, if there is exactly one block of this tag
    """

    scores_safely: ClassVar[bool] = True

    answer_tag: str | None
    prompt_strict_weight: float
    instruction_strict_weight: float
    prompt_loose_weight: float
    instruction_loose_weight: float
    answer_bonus: float
    think_bonus: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*(f"{measure}_weight" for measure in MEASURES), "answer_bonus", "think_bonus"):
            value = getattr(self, name)
            require(isfinite(value) and value >= 0, f"task.{name}", value, "must be 0 or more")

    def problem_of(self, problem_id: str, row: Row) -> Problem:
        """The answer is a JSON list of instructions and their arguments."""
        prompt = text_field(row, "prompt", "task=ifeval")
        messages = self.messages(row, [{"role": "user", "content": prompt}])
        return Problem(problem_id, messages, json.dumps(_instructions(row)))

    def score(self, problem: Problem, text: str) -> Score:
        instructions = json.loads(problem.answer)
        blocks = {tag: tagged_blocks(text, tag) for tag in ("think", self.answer_tag or "answer")}
        answers = blocks[self.answer_tag or "answer"]
        response = text if self.answer_tag is None else next(iter(answers), "")
        strict = [follows(response, *instruction) for instruction in instructions]
        readings = variants(response)
        loose = [any(follows(reading, *instruction) for reading in readings) for instruction in instructions]
        measured = (float(all(strict)), sum(strict) / len(strict), float(all(loose)), sum(loose) / len(loose))
        parts = {name: getattr(self, f"{name}_weight") * value for name, value in zip(MEASURES, measured, strict=True)}
        parts["answer"] = self.answer_bonus * (len(answers) == 1)
        parts["think"] = self.think_bonus * (len(blocks["think"]) == 1)
        return Score(sum(parts.values()), all(strict), parts, measured=_by_kind(instructions, strict))


def _by_kind(instructions: Sequence[tuple[str, Mapping[str, Any]]], followed: Sequence[bool]) -> dict[str, float]:
    """`instruction/GROUP/KIND` -> the share of the instructions of this kind that the response follows, strictly."""
    found: dict[str, list[bool]] = {}
    for (kind, _), is_followed in zip(instructions, followed, strict=True):
        found.setdefault(f"instruction/{kind.replace(':', '/')}", []).append(is_followed)
    return {name: sum(each) / len(each) for name, each in found.items()}


def _instructions(row: Row) -> list[tuple[str, Mapping[str, Any]]]:
    ids, arguments = (field(row, name, "task=ifeval") for name in ("instruction_id_list", "kwargs"))
    if not isinstance(ids, list) or not isinstance(arguments, list) or not ids or len(ids) != len(arguments):
        fix = "instruction_id_list and kwargs must be lists of the same length, not empty"
        raise ConfigError(f"{row.where} {fix}: {shown(row.value)}")
    found = []
    for name, values in zip(ids, arguments, strict=True):
        if name not in CHECKS:
            raise ConfigError(f"{row.where} unknown instruction {shown(name)}; known are {', '.join(CHECKS)}")
        # tables have a column for every argument
        given = {key: value for key, value in (values or {}).items() if value is not None}
        if wrong := problem_with(name, given):
            raise ConfigError(f"{row.where} instruction {name}, {wrong}: {shown(given)}")
        found.append((name, given))
    return found
