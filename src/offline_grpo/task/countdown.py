"""Countdown: combine given numbers with + - * / to reach a target. Problems are generated, without data files."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, ClassVar

from offline_grpo.errors import ConfigError
from offline_grpo.settings import Range
from offline_grpo.task.answers import last_tagged
from offline_grpo.task.problems import BaseTask, FormatWeight, Share, SystemPrompt, asked, hash_frac
from offline_grpo.types import Problem, Score, Split

NUM_DRAWS = 12_000
"""So many problems are drawn, of which equal ones count once."""
MAX_EXPRESSION_CHARS = 200

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True, kw_only=True)
class Countdown(BaseTask):
    """Numbers from 1 to `max_number` and a target that they reach, as in TinyZero. `Score.parts`:

        correct     1.0 if the expression uses every number exactly once and its value is the target
        format      `format_weight` if there is an expression of numbers that were given, right or wrong

    The expression is the text in the last `<answer>` block, in which `=` and what follows it does not count. A hash of
    the numbers decides the split, so that problems with the same numbers are all held out or all trained on.
    """

    min_count: Annotated[int, Range("must be from 2 to 6", lambda value: 2 <= value <= 6)]
    max_count: int
    max_number: Annotated[int, Range("must be from 10 to 1000", lambda value: 10 <= value <= 1000)]
    max_target: Annotated[int, Range("must be from 10 to 10000", lambda value: 10 <= value <= 10_000)]
    eval_frac: Share
    system_prompt: SystemPrompt
    prompt_template: str
    format_weight: FormatWeight

    scores_safely: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("max_count", self.min_count <= self.max_count <= 6, "must be from task.min_count to 6")
        for place in ("{numbers}", "{target}"):
            self.check("prompt_template", place in self.prompt_template, f"must contain {place}")

    def score(self, problem: Problem, text: str) -> Score:
        block = last_tagged(text, "answer")
        result = None if block is None else evaluate(block.content.partition("=")[0])
        numbers, target = problem.fields["numbers"], problem.fields["target"]
        is_known = result is not None and not Counter(result[1]) - Counter(numbers)
        is_correct = result is not None and Counter(result[1]) == Counter(numbers) and result[0] == target
        parts = {"correct": float(is_correct), "format": self.format_weight * is_known}
        return Score(reward=sum(parts.values()), is_correct=is_correct, parts=parts)

    @cached_property
    def _splits(self) -> dict[Split, tuple[Problem, ...]]:
        """In the order in which they were drawn. `answer` is one solution of several."""
        splits: dict[Split, dict[str, Problem]] = {split: {} for split in Split}
        rng = random.Random("countdown")
        for _ in range(NUM_DRAWS):
            # Numbers, and an expression of all of them, whose value is the target.
            numbers = [rng.randint(1, self.max_number) for _ in range(rng.randint(self.min_count, self.max_count))]
            values = [(number, str(number)) for number in numbers]
            while len(values) > 1:
                (a, left), (b, right) = (values.pop(rng.randrange(len(values))) for _ in range(2))
                results = {"+": a + b, "-": a - b, "*": a * b, **({"/": a // b} if b and a % b == 0 else {})}
                operation, value = rng.choice(list(results.items()))
                values.append((value, f"({left} {operation} {right})"))
            target, solution = values[0][0], values[0][1][1:-1]
            if not 10 <= target <= self.max_target:
                continue
            # A problem that was drawn before counts once; its numbers decide the split.
            numbers.sort()
            prompt = self.prompt_template.replace("{numbers}", ", ".join(map(str, numbers)))
            messages = asked(prompt.replace("{target}", str(target)), self.system_prompt)
            is_held_out = hash_frac(f"split {' '.join(map(str, numbers))}") < self.eval_frac
            problem_id = f"{','.join(map(str, numbers))}={target}"
            problem = Problem(problem_id, messages, solution, {"numbers": numbers, "target": target})
            splits[Split.EVAL if is_held_out else Split.TRAIN].setdefault(problem_id, problem)
        if not all(splits.values()):
            raise ConfigError(f"task.eval_frac={self.eval_frac}: leaves a split without problems")
        return {split: tuple(problems.values()) for split, problems in splits.items()}


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression of whole numbers, + - * / and brackets, and its numbers; None if it is no such
    expression. Only the syntax is Python's; nothing is executed. Sizes are limited, so that no text takes long.

    Example: "(1 + 2) / 6" -> 1/2, [1, 2, 6].
    """
    # Signs as models write them; then limits, which no text gets past that would take long.
    signs = {"\\times": "*", "\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-"}
    plain = expression.strip()
    for sign, operation in signs.items():
        plain = plain.replace(sign, operation)
    is_plain = re.fullmatch(r"[0-9+\-*/() \n]+", plain) is not None
    if not is_plain or len(plain) > MAX_EXPRESSION_CHARS or re.search(r"[0-9]{7}", plain):
        return None
    numbers: list[int] = []

    def value_of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value_of(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
        raise ValueError(type(node).__name__)

    try:
        return value_of(ast.parse(plain.replace("\n", " "), mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
