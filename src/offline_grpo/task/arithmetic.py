"""Addition and subtraction of small numbers: a task without downloads, for the tiny model and for chat models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from offline_grpo.settings import Range
from offline_grpo.task.answers import last_plain_number
from offline_grpo.task.problems import BaseTask, FormatWeight, Share, hash_frac
from offline_grpo.types import Problem, Score, Split

OPERATIONS = {"+": int.__add__, "-": int.__sub__}


@dataclass(frozen=True)
class Arithmetic(BaseTask):
    """All `a op b` with 0 <= a, b <= `max_operand`. Answers are integers; those of subtractions can be negative.

    A hash of the unordered operand pair decides the split, so `17+25`, `25+17` and `17-25` are all held out or all
    trained on.

    Reward: 1 if the last number of the text is the answer, plus `format_weight` if the text is exactly one integer.
    """

    # every pair is enumerated: at most 10^6
    max_operand: Annotated[int, Range("must be from 1 to 999", lambda value: 1 <= value <= 999)]
    operations: list[str]
    eval_frac: Share
    prompt_template: str
    format_weight: FormatWeight

    scores_safely: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = 0 < len(self.operations) == len(set(self.operations) & set(OPERATIONS))
        self.check("operations", is_known, f"give one or more of {[*OPERATIONS]}, each once")
        # The prompt is written with every number and sign; otherwise different problems look alike.
        cases = [{"a": a, "op": operation, "b": b} for a in (0, 1) for operation in self.operations for b in (0, 1)]
        try:
            has_all = len({self.prompt_template.format(**case) for case in cases}) == len(cases)
        except (KeyError, IndexError, ValueError, AttributeError):
            has_all = False
        fix = "different problems look alike, or cannot be written; use {a}, {op} and {b}"
        self.check("prompt_template", has_all, fix)
        is_split = all(self.problems(split) for split in Split)
        self.check("eval_frac", is_split, "leaves a split without problems; raise task.max_operand")

    def score(self, problem: Problem, text: str) -> Score:
        """Score the last number of the text, so that a chat model may explain first. `42.0` and `1,042` count as
        integers.
        """
        whole, _, fraction = (last_plain_number(text) or "none").partition(".")
        is_correct = whole != "none" and not fraction.strip("0") and str(int(whole)) == problem.answer
        is_bare = re.fullmatch(r"\s*-?[0-9]+\s*", text) is not None
        parts = {"correct": float(is_correct), "format": self.format_weight * is_bare}
        return Score(reward=sum(parts.values()), is_correct=is_correct, parts=parts)

    @cached_property
    def _splits(self) -> dict[Split, tuple[Problem, ...]]:
        """Shuffled by a fixed hash of their ids."""
        # Both orders and all signs of a pair are on one side; then each split has an order of its own.
        splits: dict[Split, list[Problem]] = {split: [] for split in Split}
        numbers = range(self.max_operand + 1)
        for low in numbers:
            for high in numbers[low:]:
                split = Split.EVAL if hash_frac(f"split {low} {high}") < self.eval_frac else Split.TRAIN
                for a, b in {(low, high), (high, low)}:
                    for op in self.operations:
                        splits[split].append(self._problem(a, op, b))
        return {
            split: tuple(sorted(problems, key=lambda p: hash_frac(f"order {p.problem_id}")))
            for split, problems in splits.items()
        }

    def _problem(self, a: int, op: str, b: int) -> Problem:
        messages = ({"role": "user", "content": self.prompt_template.format(a=a, op=op, b=b)},)
        return Problem(f"{a}{op}{b}", messages, str(OPERATIONS[op](a, b)))
