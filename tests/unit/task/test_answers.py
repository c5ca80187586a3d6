"""Answers are found in completions and compared by value; no text makes that hang or raise. The problems that come with
the package have the answers that sympy computes.
"""

import json
import random
import subprocess
import sys
from contextlib import ExitStack

import pytest
import sympy
from factories import compose_config
from math_verify import parse, verify

from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.problems import build_task, isolated
from offline_grpo.generation.judging import Judgement
from offline_grpo.task.answers import is_same_value, last_boxed, last_number, reference_answer
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
    ("auto", "72", r"\boxed{100-28}"),
    ("auto", "10^{-3}", r"\boxed{0.001}"),
    ("math", "x^9-1", r"\boxed{(x-1)(x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1)}"),  # too long for auto
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
    for any_latex in (False, True):
        assert is_same_value(reference, reference, any_latex=any_latex)
        assert not is_same_value(reference, answer, any_latex=any_latex)


FORMS = (
    "{}",
    "${}$",
    r"\[{}\]",
    "**{}**",
    r"\boxed{{{}}}",
    r"First $x=3$, so it is $\boxed{{{}}}$.",
    "<answer>{}</answer>",
    "Add 4 and 5.\n#### {}",
    "The answer is {}.",
    "Add 4 and 5 to 7.\n\n**Answer:** {}",
    "Take $x=3$ of 12.\nTherefore, the final answer is ${}$. I hope it is correct.",
    r"As $x=3$, it is \({}\).",
)
"""In which a completion has its answer."""
KINDS = [  # of answers, as in MATH-500: right ones, of which the first is the row's, and wrong ones
    ([r"\frac{13}{8}", r"\dfrac{13}{8}", "13/8", "1.625"], [r"\frac{8}{13}", r"\frac{13}{9}", "13"]),
    ([r"-\frac{1}{3}", "-1/3", r"-\dfrac13"], [r"\frac{1}{3}", "3"]),
    (["8", "8.0"], [r"\frac{13}{8}", "-8"]),
    ([r"17\sqrt{9}", "51"], ["17", r"17\sqrt{3}"]),
    (["(7,23]", r"x \in \left(7,23\right]"], ["(7,23)", "[7,23)", "23"]),
    (["23"], ["(7,23]"]),
    ([r"(-\infty,-2]\cup[3,\infty)", "(-∞, -2] \N{UNION} [3, ∞)"], [r"(-\infty,-2)\cup[3,\infty)"]),
    ([r"\left(3,\frac{\pi}{2}\right)", "(3, π/2)"], [r"(3,\pi)"]),
    (["(6,31,-1)", "(6, 31, -1)"], ["(6,31,1)", "(31,6,-1)"]),
    ([r"\{2,3\}", r"\{3,2\}"], [r"\{2,4\}"]),
    (["1,-2", "-2, 1"], ["1", "1,2"]),
    ([r"\begin{pmatrix} 1 & -2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&-2\\3&4\end{bmatrix}"], ["4"]),
    ([r"90^\circ", "90", r"90^{\circ}", "90°", "90 degrees"], ["45"]),
    ([r"10\%", "10%", "10"], [r"100\%"]),
    ([r"5\text{ cm}", "5 cm", "5"], ["6 cm"]),
    ([r"864 \mbox{ inches}^2", "864"], ["846"]),
    ([r"\$18.90", "18.9"], ["1890"]),
    (["58,500", r"58{,}500", r"58,\!500", "58500"], ["58", "500"]),
    (["-7", "\N{MINUS SIGN}7"], ["7"]),
    ([r"\text{Evelyn}", "evelyn"], ["Briana"]),
    ([r"\text{(C)}", "C", "(C)"], ["(D)"]),
    ([r"\text{east}", "east"], ["seat"]),  # the same product of letters
    (["6 - 5i", "-5i+6"], ["6+5i"]),
    ([r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"], [r"1+\sqrt{19}"]),
    (["x^3+3x-6", "3x-6+x^3"], ["x^3-3x-6"]),
    (["y = 2x + 3", "2x+3"], ["y=3x+2"]),
    (["2k"], ["2"]),
    (["4210_5", "4210_{5}"], ["4210_6"]),
    ([r"12:30\text{ p.m.}", "12:30 p.m."], ["12:31", "12:30 a.m."]),
    ([r"3 \frac{1}{2}", "3.5", r"\frac{7}{2}"], [r"\frac{3}{2}", "2"]),
    (["1,000,000", "10^6"], ["1"]),
    ([r"\log_2 5"], [r"\log_2 6"]),
]


@pytest.mark.parametrize("kind", ["auto", "math"])
@pytest.mark.parametrize(("right", "wrong"), KINDS, ids=lambda each: each[0])
def test_answers_count_in_every_form(kind, right, wrong):
    for form in FORMS if kind == "auto" else FORMS[::4]:
        for answer in (*right, *wrong):
            text = form.format(answer)
            assert is_right(kind, right[0], text) is (answer in right), text


@pytest.mark.parametrize("kind", ["auto", "math", "text"])
def test_a_completion_that_is_the_answer_counts(kind):
    for answer in (r"\boxed{5}", "#### 5", r"\overline{AB}", "Let $x$ be 2. Then #### no", "x" * 500, "a\nb"):
        assert is_right(kind, answer if kind == "text" else reference_answer(answer), answer), answer
    assert is_right("text", r"\boxed{x+1}", r"It is \boxed{x+1}.")
    assert not is_right("text", r"\boxed{x+1}", r"It is \boxed{1+x}.")


STATED = [
    ("72", "The answer is 72 apples (in total)."),
    ("72", "Answer:\n1. Add 48 and 24.\n2. That is 72."),
    ("72", "It costs $5 and then $7, which is 72."),
    ("72", "48+24=72\n72"),
    ("72", "= 72"),
    ("8", "The answer is $8$, not $9$."),
]


def test_what_a_completion_states_goes_before_its_last_number():
    for reference, text in STATED:
        assert is_right("auto", reference, text), text
    assert not is_right("auto", "9", "The answer is $8$, not $9$.")


@pytest.fixture(scope="module")
def gsm8k():
    return build_task(as_plain(compose_config("task=gsm8k", "task.path=unused/unused").task))


PAID = [  # gold, text, whether it is right
    ("72", r"48 + 24 = 72, so \boxed{72}.", True),
    ("72", r"\boxed{\text{Total} = 72}", True),
    ("72", r"\boxed{48 + 24 = 72}", True),
    ("72", r"First \boxed{24}, then \boxed{72}", True),
    ("1234", r"\boxed{1\,234}", True),
    ("2.5", r"\boxed{2\frac{1}{2}}", True),
    ("72", "**72**", True),  # without a box, the last number
    ("3", "8-3", True),
    ("72", r"\boxed{72,000}", False),
    ("72", r"\boxed{72 or 73}", False),
    ("72", "\\boxed{\u0667\u0662}", False),
    ("0", r"\boxed{0/0}", False),
    ("72", "72 apples and 3 pears", False),
    ("72", r"\boxed{" + "9" * 100_000 + "}", False),
]


def test_a_right_answer_and_a_box_are_paid(gsm8k):
    for gold, text, is_equal in PAID:
        result, form = gsm8k.score(Problem("p", (), gold), text), gsm8k.format_weight if "boxed" in text else 0.0
        assert (result.is_correct, result.parts) == (is_equal, {"correct": float(is_equal), "format": form}), text
        assert result.reward == is_equal + form


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{\frac{1}{2}} and \boxed {3}.") == "3"
    assert last_boxed(r"\boxed{\frac{1}{2}} {") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{2") is None


LAST = {
    "1 then 2,345.60.": "2,345.60",
    "x = -3": "-3",
    "Python3": None,
    r"-\$3": "-3",
    "$10-$3": "3",
    "it is -.5": "-0.5",
    "$.50.": "0.50",
    "It is done.5": None,
    "version 1.2.3": "1.2",
    "7 .2.3": "7",
}


def test_last_number():
    assert {text: last_number(text) for text in LAST} == LAST


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


SAMPLE = "src/offline_grpo/task/math_sample.jsonl"


def test_the_answers_of_the_packaged_problems_are_what_sympy_computes(pytestconfig):
    rows = [json.loads(line) for line in (pytestconfig.rootpath / SAMPLE).read_text().splitlines()]
    assert len({row["problem"] for row in rows}) == len(rows) == 62
    symbols = {name: sympy.Symbol(name, real=True) for name in "xk"}
    for row in rows:
        value = eval(row["check"], {**vars(sympy), "sorted": sorted}, symbols)
        [answer, *_] = parse(rf"\boxed{{{reference_answer(row['solution'])}}}", parsing_timeout=0)
        value = value.rhs if isinstance(value, sympy.Eq) else value
        if isinstance(value, sympy.Tuple):  # which math-verify reads as an interval
            assert reference_answer(row["solution"]) == f"({value[0]},{value[1]})"
        else:
            assert verify([sympy.sympify(value)], [answer], timeout_seconds=None), row


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_costs_one_reward(tmp_path):
    words = ("task=math_sample", "scoring.timeout_s=3", "scoring.memory_mib=1024", "scoring.workers=3")
    config = typed(compose_config(*words))
    tower = r"\boxed{9^{9^{9^{9^{9}}}}}"
    texts = [tower, r"\boxed{10^{10^{10}}!}", r"\boxed{36}"]
    with ExitStack() as stack:
        safe = isolated(build_task(config.task), config, tmp_path, stack)
        scores = Judgement(safe, Problem("p", (), "36"), texts).scores()
    assert [score.is_correct for score in scores] == [False, False, True]
