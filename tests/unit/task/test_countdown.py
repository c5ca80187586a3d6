"""Countdown: every problem can be solved, and only expressions of the given numbers are paid for."""

import itertools
from fractions import Fraction

import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task
from offline_grpo.task.countdown import evaluate
from offline_grpo.types import Problem, Split


def make(*overrides):
    return build_task(typed(compose_config("task=countdown", *overrides)).task)


@pytest.fixture(scope="module")
def task():
    return make()


PROBLEM = Problem("p", (), "36", {"numbers": [3, 3, 12], "target": 36})


@pytest.mark.parametrize(
    ("text", "correct", "form"),
    [
        ("think <answer>(12 - 3) * 3 + 3</answer>", 0, 0),  # a number too often
        ("<answer>3 * 12</answer>", 0, 0.1),  # right, but a number is missing
        ("<answer>(3 + 3) * 12 / 2</answer>", 0, 0),  # 2 was not given
        ("<answer>12 ** 3 - 3</answer>", 0, 0),
        ("<answer>12 / (3 - 3)</answer>", 0, 0),
    ],
)
def test_wrong_answers(task, text, correct, form):
    score = task.score(PROBLEM, text)
    assert (score.parts, score.is_correct) == ({"correct": correct, "format": form}, bool(correct))


@pytest.mark.parametrize(
    "answer", ["12 * (9 - 6) ", "(9-6)*12 = 36", "12×(9−6)", "\n(9 - 6) \\times 12\n", "-(6 - 9) * 12"]
)
def test_right_answers(task, answer):
    problem = Problem("p", (), "36", {"numbers": [6, 9, 12], "target": 36})
    score = task.score(problem, f"<answer>1</answer> or <answer>{answer}</answer>")
    assert (score.parts, score.reward) == ({"correct": 1.0, "format": 0.1}, 1.1)


@pytest.mark.parametrize("text", ["(" * 99 + "1", "-" * 199 + "1", "9**9**9", "1_0"])
def test_hostile_expressions_are_none_at_once(text):
    assert evaluate(text) is None or text.startswith("-")


def reachable(numbers):
    """Every value of an expression of all numbers, found by trying each."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        for value in (a + b, a - b, a * b, *([Fraction(a) / b] if b else [])):
            found |= reachable([*rest, value])
    return found


def test_problems_can_be_solved_and_splits_share_no_numbers(task):
    train, held_out = task.problems(Split.TRAIN), task.problems(Split.EVAL)
    for problem in [*train[:15], *held_out[:5]]:
        assert problem.fields["target"] in reachable(problem.fields["numbers"])
        assert task.score(problem, f"<answer>{problem.answer}</answer>").is_correct
    numbers = [{tuple(p.fields["numbers"]) for p in problems} for problems in (train, held_out)]
    assert not numbers[0] & numbers[1]
    assert 0.08 < len(held_out) / (len(train) + len(held_out)) < 0.12
    assert {len(p.fields["numbers"]) for p in train} == {3, 4}
    assert len({p.problem_id for p in (*train, *held_out)}) == len(train) + len(held_out) > 3_000
    assert train == make().problems(Split.TRAIN)
