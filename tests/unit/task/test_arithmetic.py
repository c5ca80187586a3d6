import pytest

from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Problem, Split

SETTINGS = {
    "max_operand": 20,
    "operations": ["+", "-"],
    "eval_frac": 0.2,
    "prompt_template": "{a}{op}{b}=",
    "format_weight": 0.1,
}


def make(**settings):
    return Arithmetic(**{**SETTINGS, **settings})


def ids(task, split):
    return [problem.problem_id for problem in task.problems(split)]


def test_every_pair_is_in_exactly_one_split():
    task = make()
    train, held_out = ids(task, Split.TRAIN), ids(task, Split.EVAL)
    everything = [f"{a}{op}{b}" for a in range(21) for b in range(21) for op in "+-"]
    assert sorted(train + held_out) == sorted(everything)
    prompts = {split: {p.messages[0]["content"] for p in task.problems(split)} for split in Split}
    assert not prompts[Split.TRAIN] & prompts[Split.EVAL]
    assert 0.1 < len(held_out) / len(everything) < 0.3


def test_order_and_split_never_change():
    """Recorded runs refer to problems by their place in the order."""
    assert ids(make(max_operand=99, operations=["+"]), Split.EVAL)[:3] == ["6+96", "88+80", "9+61"]


@pytest.mark.parametrize(
    ("answer", "text", "is_correct", "reward"),
    [
        ("42", "42", True, 1.1),
        ("42", "43", False, 0.1),
        ("42", "17 + 25 = 42.", True, 1.0),
        ("42", "The answer is 42.0", True, 1.0),
        ("42", "42.5", False, 0.0),
        ("1042", "1,042", True, 1.0),
        ("-8", "-8", True, 1.1),
        ("-8", "\N{MINUS SIGN}8", True, 1.0),
        ("42", "\N{FULLWIDTH DIGIT FOUR}\N{FULLWIDTH DIGIT TWO}", False, 0.0),
    ],
)
def test_scores(answer, text, is_correct, reward):
    score = make().score(Problem("x", (), answer), text)
    assert score.is_correct is is_correct
    assert score.reward == pytest.approx(reward)
    assert score.reward == sum(score.parts.values())
    assert set(score.parts) == {"correct", "format"}


@pytest.mark.parametrize("text", ["1,111" * 50_000, "\ud800"])
def test_no_text_raises_or_hangs(text):
    assert 0 <= make().score(Problem("x", (), "42"), text).reward <= 1.1
