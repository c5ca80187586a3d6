"""LaTeX answers by math-verify, and the problems that come with the package."""

import json
from contextlib import ExitStack

import pytest
import sympy
from factories import compose_config
from math_verify import parse, verify

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task, isolated
from offline_grpo.generation.judging import Judgement
from offline_grpo.task.answers import reference_answer
from offline_grpo.types import Problem

SAMPLE = "src/offline_grpo/task/math_sample.jsonl"


@pytest.fixture(scope="module")
def config():
    return typed(
        compose_config("task=math_sample", "scoring.timeout_s=3", "scoring.memory_mib=1024", "scoring.workers=3")
    )


@pytest.fixture(scope="module")
def task(config):
    return build_task(config.task)


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


@pytest.mark.parametrize(
    ("reference", "text", "is_right"),
    [
        (r"\frac{5}{6}", r"So it is $\boxed{\frac{10}{12}}$.", True),
        (r"\{2,3\}", r"\boxed{\{3, 2\}}", True),
        (r"\begin{pmatrix}2&1\\4&3\end{pmatrix}", r"\boxed{\begin{bmatrix} 2 & 1 \\ 4 & 3 \end{bmatrix}}", True),
        (r"x^9-1", r"\boxed{(x-1)(x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1)}", True),  # too long for answer_kind=auto
        ("36", r"Thus the price is $36$.", True),
        ("36", r"\boxed{63}", False),
    ],
)
def test_answers_are_compared_by_value(task, reference, text, is_right):
    assert task.score(Problem("p", (), reference), text).is_correct is is_right


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_costs_one_reward(task, config, tmp_path):
    tower = r"\boxed{9^{9^{9^{9^{9}}}}}"
    texts = [tower, r"\boxed{10^{10^{10}}!}", r"\boxed{36}"]
    with ExitStack() as stack:
        safe = isolated(task, config, tmp_path, stack)
        scores = Judgement(safe, Problem("p", (), "36"), texts).scores()
    assert [score.is_correct for score in scores] == [False, False, True]
