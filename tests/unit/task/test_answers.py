"""Answers are found in completions and compared by value; no text makes that hang or raise."""

import random
import subprocess
import sys

import pytest
from factories import compose_config

from offline_grpo.config.compose import as_plain
from offline_grpo.config.problems import build_task
from offline_grpo.task.answers import is_same_latex, is_same_number, is_same_value, last_boxed, last_number
from offline_grpo.task.dataset import is_right
from offline_grpo.types import Problem

RIGHT = [
    ("auto", "0.5", r"so \boxed{\frac{1}{2}}"),
    ("auto", "x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("auto", r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    ("auto", r"\text{Evelyn}", r"\boxed{Evelyn}"),
    ("auto", "Paris", "<answer>paris</answer>"),
    ("auto", "72", "48 + 24 is 72 apples."),
    ("auto", "72", "think\n#### 72"),
    ("auto", "-5", "The answer is \N{MINUS SIGN}5"),
    ("auto", "-5", "The answer is -$5."),
    ("auto", "0.5", "It is .5"),
    ("auto", "2020-01-05", r"\boxed{2020-01-05}"),
    ("math", "2020-01-05", "It was on 2020-01-05."),
    ("auto", "1/2", r"\boxed{0.5}"),
    ("auto", "3 - 2", r"\boxed{1}"),
    ("auto", "10^{-3}", r"\boxed{0.001}"),
    ("text", "x = 1", r"\boxed{x = 1}"),
    ("regex", r"(?i)\bparis\b", "It is PARIS."),
]
WRONG = [
    ("auto", "Paris", "Paris or London"),
    ("auto", "(1,2)", "(2,1)"),
    ("auto", "72", r"72, so \boxed{71}"),
    ("auto", "5", "It is .5"),
    ("auto", "2014", "It was 2020.2014"),
    ("math", "2020-01-05", "It was on 2021-01-06."),
    ("math", "2020-01-05", "2014"),
    ("text", "1.0", "1"),
    ("regex", "^yes$", "yes and no"),
]


def test_answers_are_compared():
    for kind, reference, text in [*RIGHT, *WRONG]:
        assert is_right(kind, reference, text) is ((kind, reference, text) in RIGHT), (kind, reference, text)


@pytest.mark.parametrize(
    ("reference", "answer"), [("2020-01-05", "2021-01-06"), ("01/05/2020", "02/10/2020"), ("$3-2$", "2-1")]
)
def test_dates_scores_and_telephone_numbers_are_text(reference, answer):
    for compare in (is_same_value, is_same_number, is_same_latex):
        assert compare(reference, rf"\boxed{{{reference}}}" if compare is is_same_latex else reference)
        assert not compare(reference, rf"\boxed{{{answer}}}" if compare is is_same_latex else answer)


@pytest.fixture(scope="module")
def gsm8k():
    return build_task(as_plain(compose_config("task=gsm8k", "task.path=unused/unused").task))


EQUAL = [
    ("72", r"48 + 24 = 72, so \boxed{72}."),
    ("72", r"\boxed{72.0}"),
    ("72", r"\boxed{72 \text{ dollars}}"),
    ("72", r"\boxed{72\%}"),
    ("72", r"\boxed{\text{Total} = 72}"),
    ("72", r"\boxed{48 + 24 = 72}"),
    ("72", r"First \boxed{24}, then \boxed{72}"),
    ("1234", r"\boxed{1{,}234}"),
    ("1234", r"\boxed{1\,234}"),
    ("2.5", r"\boxed{2\frac{1}{2}}"),
    ("-5", "\\boxed{\N{MINUS SIGN}5}"),
    ("72", "**72**"),  # without a box, the last number
    ("3", "8-3"),
]
OTHER = [
    ("72", r"\boxed{-72}"),
    ("72", r"\boxed{72,000}"),
    ("72", r"\boxed{72 or 73}"),
    ("72", "\\boxed{\u0667\u0662}"),
    ("72", r"\boxed{1/0}"),
    ("0", r"\boxed{0/0}"),
    ("72", "72 apples and 3 pears"),
    ("72", r"\boxed{" + "9" * 100_000 + "}"),
]


@pytest.mark.parametrize(("gold", "text"), [*EQUAL, *OTHER])
def test_numbers_are_compared_with_their_units(gsm8k, gold, text):
    result = gsm8k.score(Problem("p", (), gold), text)
    is_equal, form = (gold, text) in EQUAL, gsm8k.format_weight if "boxed" in text else 0.0
    assert (result.is_correct, result.parts) == (is_equal, {"correct": float(is_equal), "format": form})
    assert result.reward == is_equal + form


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{\frac{1}{2}} and \boxed {3}.") == "3"
    assert last_boxed(r"\boxed{\frac{1}{2}} {") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{2") is None


def test_last_number():
    assert last_number("1 then 2,345.60.") == "2,345.60"
    assert last_number("x = -3") == "-3"
    assert last_number("Python3") is None
    assert last_number(r"-\$3") == "-3"
    assert last_number("$10-$3") == "3"
    assert last_number("it is -.5") == "-0.5"
    assert last_number("$.50.") == "0.50"
    assert last_number("It is done.5") is None
    assert last_number("version 1.2.3") == "1.2"
    assert last_number("7 .2.3") == "7"


NUMBERS = [
    *("9^{9^{9^{9}}}", "9**9**9**9", "9* *9* *9", "99999999!", "1E9999999999", "\\binom{99999999}{44444444}"),
    *("\\sum_{i=1}^{10^9} i", "(" * 30 + "1" + ")" * 30, "{" * 30 + "1" + "}" * 30, "-" * 79 + "1", "1" * 79),
    *("1/11/1/1/111/111111/1/1/11/11111/1/11/1/1/1/1", "\\frac{1}{" * 12 + "2" + "}" * 12),
]
FORMULAS = [
    *("(x+y+z)^{99}", "(x+1)^537", "((x+y)^4+1)^4^4", "(x+1)^{4^{4}}", "x!" * 10, "(" * 40 + "x" + ")" * 40),
    *("\\sqrt{" * 12 + "2" + "}" * 12, "((x+y+z+n)^4+(x-y)^4)^4+(x+1)^4", "(((a+b+c+d+e+f)^4)^4)^4"),
    *("{[(a+b+c+d+e+f)^{4}]^{-3}+1}^4", "\\frac{1}{" * 6 + "x" + "}" * 6, "x" * 100_000),
]


def test_hostile_answers_neither_hang_nor_raise():
    code = (
        "import sys; from offline_grpo.task.answers import is_same_value; numbers, formulas = eval(sys.stdin.read())\n"
        "print({*(is_same_value('72', a) for a in numbers), *(is_same_value('x^2+1', a) for a in formulas)})"
    )
    asked = repr((NUMBERS, [*NUMBERS, *FORMULAS]))
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{False}\n"


def test_scoring_never_raises(gsm8k):
    rng = random.Random(1)
    marks = [
        "\\boxed{",
        "\\frac",
        "\\",
        "72",
        "\N{FULLWIDTH DIGIT ONE}",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "\ud800",
        "\0",
    ]
    texts = ["".join(rng.choices([*marks, *"{}(),.-=/*^$%x "], k=rng.randint(0, 12))) for _ in range(200)]
    for text in [*texts, *(f"\\boxed{{{text}}}" for text in texts)]:
        result = gsm8k.score(Problem("p", (), "72"), text)
        assert result.reward == sum(result.parts.values())
