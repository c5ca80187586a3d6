import itertools
import re

import pytest

from offline_grpo.task.sat import SAT
from offline_grpo.types import Problem, Split

# (x1 OR x2 OR x3) AND NOT (x1 AND x2 AND x3): solved by every assignment but 000 and 111.
HAND_MADE = Problem("hand-made", (), "p cnf 3 2\n1 2 3 0\n-1 -2 -3 0")


def make_sat(
    difficulty: float | None = None, max_solution_frac: float | None = None, system_prompt: str | None = None
) -> SAT:
    return SAT(difficulty=difficulty, max_solution_frac=max_solution_frac, system_prompt=system_prompt)


def clauses_in_prompt(problem: Problem) -> tuple[int, list[dict[int, bool]]]:
    """What a reader of the prompt sees: k, and each clause as {variable: wanted value}."""
    prompt = problem.messages[-1]["content"]
    num_variables = int(re.search(r"Variables: x1 to x(\d+)\n", prompt)[1])
    clauses = [
        {int(literal.removeprefix("NOT ")[1:]): not literal.startswith("NOT ") for literal in line.split(" OR ")}
        for line in re.findall(r"^\((.*)\)$", prompt, re.MULTILINE)
    ]
    return num_variables, clauses


def is_solution(clauses: list[dict[int, bool]], bits: tuple[int, ...]) -> bool:
    return all(any(bool(bits[variable - 1]) == wanted for variable, wanted in clause.items()) for clause in clauses)


def solutions_by_hand(problem: Problem) -> list[tuple[int, ...]]:
    num_variables, clauses = clauses_in_prompt(problem)
    return [bits for bits in itertools.product((0, 1), repeat=num_variables) if is_solution(clauses, bits)]


def answer_text(bits: tuple[int, ...]) -> str:
    return f"<SOLUTION>{' '.join(map(str, bits))}</SOLUTION>"


REWARDS = {  # text -> reward, added up by hand
    "<SOLUTION>0 1 0</SOLUTION>": 1.0 + 0.045 + 0.02 + 0.045 + 0.02 + 0.005,
    "<start_working_out>x2 = 1</end_working_out>\n<solution>\n0 1\n0 </SOLUTION>": 1.135,
    "<SOLUTION>0 0 0</SOLUTION>": 0.135,
    # The last of several blocks counts, and only the strict term is lost.
    "<SOLUTION>0 0 0</SOLUTION> no, <SOLUTION>0 1 0</SOLUTION>": 1.09,
    "": -0.2,
    "<SOLUTION>0 1</SOLUTION>": -0.2 + 0.02 + 0.02 + 0.005,
    "<SOLUTION>0 1 2</SOLUTION>": -0.2 + 0.02 + 0.02,
    "<SOLUTION>a: 0 1 0</SOLUTION>": -0.2 + 0.02 + 0.045 + 0.02,
    "<SOLUTION>\u0660 \u0661 \u0660</SOLUTION>": -0.2 + 0.02 + 0.02,
    "<SOLUTION>0 1 0</SOLUTION>\n": -0.2 + 0.02 + 0.045 + 0.0199 + 0.005,
    "<SOLUTION>0 1 0</SOLUTION>" + "x" * 300: -0.2 + 0.02 + 0.045 + 0.005,
}


@pytest.mark.parametrize(("text", "reward"), REWARDS.items())
def test_reward_table(text, reward):
    score = make_sat().score(HAND_MADE, text)
    assert score.reward == pytest.approx(reward, abs=1e-12)
    assert score.reward == sum(score.parts.values())
    assert score.is_correct == (reward > 1)


def test_success_means_that_the_assignment_solves_the_prompt():
    task = make_sat()
    for problem in task.problems(Split.TRAIN)[1000:1006]:
        solutions = set(solutions_by_hand(problem))
        num_variables, _ = clauses_in_prompt(problem)
        for bits in itertools.product((0, 1), repeat=num_variables):
            score = task.score(problem, answer_text(bits))
            assert score.is_correct == (bits in solutions)
            assert score.parts["correctness"] == float(bits in solutions)


def test_the_seed_projects_problems_are_reproduced():
    """Measured on the generator of grail's trainer: training seeds 1000-1063, and evaluation ids 5000-5015 at its fixed
    difficulty 0.48.
    """

    def count_solved_by_zeros(problems):
        return sum(is_solution(clauses, (0,) * k) for k, clauses in map(clauses_in_prompt, problems))

    training = make_sat().problems(Split.TRAIN)[1000:1064]
    assert count_solved_by_zeros(training) / 64 == 0.375
    assert {clauses_in_prompt(problem)[0] for problem in training} == set(range(5, 11))
    num_clauses = {len(clauses_in_prompt(problem)[1]) for problem in training}
    assert (min(num_clauses), max(num_clauses)) == (7, 13)
    assert count_solved_by_zeros(make_sat(difficulty=0.48).problems(Split.TRAIN)[5000:5016]) / 16 == 0.25


@pytest.mark.parametrize(("difficulty", "frac"), [(None, 1 / 32), (0.6, 0.01)])
def test_hard_problems_have_solutions_but_few(difficulty, frac):
    for problem in make_sat(difficulty, max_solution_frac=frac).problems(Split.TRAIN)[1000:1040]:
        num_variables, _ = clauses_in_prompt(problem)
        assert 1 <= len(solutions_by_hand(problem)) <= frac * 2**num_variables
