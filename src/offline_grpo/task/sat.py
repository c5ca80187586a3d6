"""3-SAT: find an assignment that satisfies every clause. Problems are generated from seeds, without limit and without
data files.

The problem generator, prompt convention and reward table come from the grail offline trainer; its training seeds give
the same formulas here. In those formulas a random assignment solves a quarter to a third of the problems.
`SAT.max_solution_frac` prevents this.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from offline_grpo.settings import Range
from offline_grpo.task.answers import last_tagged
from offline_grpo.task.problems import MANY, BaseTask, LazyProblems, SystemPrompt, asked
from offline_grpo.types import Problem, Score, Split

Clause = tuple[int, ...]
"""Three literals: +i is the variable x_i, -i its negation; i counts from 1."""


@dataclass(frozen=True, kw_only=True)
class SAT(BaseTask):
    """Random 3-SAT with a dense format reward.

    Problem i of a split has seed i. The seed string is `str(i)` in the training split, as in grail, and `eval-i` in the
    evaluation split. The splits therefore share no seed: equal indices are different problems, and no prompt is in
    both.

    The formula has k variables and m clauses, drawn uniformly from `size_range(d)`, where the difficulty d is
    `difficulty` or, if that is None, 0.3 + (i mod 100) / 250.

    A completion answers with k bits, `<SOLUTION>0 1 ...</SOLUTION>`; if there are several such blocks, the last counts.
    `Score.parts`:

        correctness     1.0 if the bits satisfy the formula, 0 if they do not, -0.2 if the answer is malformed: there is
                        no block, it contains anything but k bits and whitespace, or text follows it
        strict_format   0.15 x 0.3 if well formed and the only block
        soft_format     0.10 x 0.2 if there is a block
        shape           0.15 x 0.3 if the block contains exactly k bits, whatever else it contains
        no_trailing     0.10 x max(0, 0.2 - 0.001 x characters after the block); 0 without a block
        charset         0.05 x 0.1 if the block contains nothing but bits and whitespace

    The reward is their sum, from -0.2 (no block) to 1.135.

    With `max_solution_frac`, clauses that would leave no solution are redrawn, and clauses are added until few enough
    solutions remain. So problems are always solvable, but may be longer than `size_range` says.
    """

    difficulty: Annotated[
        float | None, Range("must lie in [0, 1]; null takes it from each problem's seed", lambda value: 0 <= value <= 1)
    ]
    max_solution_frac: float | None
    system_prompt: SystemPrompt

    scores_safely: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        frac, least = self.max_solution_frac, 2 ** -size_range(self._difficulty(0))[0][0]
        fix = f"must lie in [{least}, 1), at least one of all assignments; raise it or task.difficulty"
        self.check("max_solution_frac", frac is None or least <= frac < 1, fix)

    def problems(self, split: Split) -> LazyProblems:
        """The first 10^9 problems of a split, generated when indexed; ids are `sat-i` and `sat-eval-i`."""
        return LazyProblems(partial(self._problem, "" if split is Split.TRAIN else "eval-"), range(MANY))

    def _difficulty(self, index: int) -> float:
        return 0.3 + (index % 100) / 250 if self.difficulty is None else self.difficulty

    def _problem(self, prefix: str, index: int) -> Problem:
        """The answer is the formula in DIMACS CNF, the text format of SAT solvers."""
        count, clauses = draw_formula(f"{prefix}{index}", self._difficulty(index), self.max_solution_frac)
        literals = [[f"x{literal}" if literal > 0 else f"NOT x{-literal}" for literal in clause] for clause in clauses]
        lines = "\n".join(f"({' OR '.join(clause)})" for clause in literals)
        prompt = (
            f"SAT Problem\nVariables: x1 to x{count}\nClauses:\n{lines}\n\n"
            "Find values of the variables that make every clause true. Provide your final assignment between "
            f"<SOLUTION></SOLUTION> as space-separated 0/1: {count} values, from x1 to x{count}, and nothing after it."
        )
        dimacs = [f"p cnf {count} {len(clauses)}", *(" ".join(map(str, (*clause, 0))) for clause in clauses)]
        return Problem(f"sat-{prefix}{index}", asked(prompt, self.system_prompt), "\n".join(dimacs))

    def score(self, problem: Problem, text: str) -> Score:
        # Without a block there is nothing to pay for; all other terms are of the last one.
        block = last_tagged(text, "SOLUTION")
        if block is None:
            names = ("strict_format", "soft_format", "shape", "no_trailing", "charset")
            parts = {"correctness": -0.2} | dict.fromkeys(names, 0.0)
            return Score(reward=sum(parts.values()), is_correct=False, parts=parts)
        header, *lines = problem.answer.splitlines()
        bits = [char == "1" for char in block.content if char in "01"]
        has_k_bits = len(bits) == int(header.split()[2])
        is_only_bits = re.fullmatch(r"[01\s]*", block.content) is not None
        is_well_formed = has_k_bits and is_only_bits and block.num_trailing_chars == 0
        # Every clause needs a true literal.
        clauses = ([int(word) for word in line.split()[:-1]] for line in lines)
        is_correct = is_well_formed and all(any(bits[abs(x) - 1] == (x > 0) for x in clause) for clause in clauses)
        parts = {
            "correctness": float(is_correct) if is_well_formed else -0.2,
            "strict_format": 0.15 * 0.3 if is_well_formed and block.is_only_block else 0.0,
            "soft_format": 0.10 * 0.2,
            "shape": 0.15 * 0.3 if has_k_bits else 0.0,
            "no_trailing": 0.10 * max(0.0, 0.2 - 0.001 * block.num_trailing_chars),
            "charset": 0.05 * 0.1 if is_only_bits else 0.0,
        }
        return Score(reward=sum(parts.values()), is_correct=is_correct, parts=parts)


def size_range(difficulty: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """(min, max) variables and (min, max) clauses of a problem, both inclusive."""
    variables = 4 + int(5.5 * difficulty), 4 + int(11 * difficulty)
    clauses = 5 + int(7.5 * difficulty), 5 + int(15 * difficulty)
    return variables, clauses


def draw_formula(seed: str, difficulty: float, max_solution_frac: float | None) -> tuple[int, list[Clause]]:
    """Number of variables and clauses of a seed. The same arguments give the same formula on every machine and Python
    version. With `max_solution_frac`, at least one assignment and at most this fraction of all satisfies it.
    """
    # Sizes first: their order, and that of all draws, is what gives grail's formulas.
    rng = random.Random(hashlib.sha256(seed.encode()).digest())
    num_variables, num_clauses = (rng.randint(*bounds) for bounds in size_range(difficulty))

    def draw_clause() -> Clause:
        variables = rng.sample(range(1, num_variables + 1), 3)
        return tuple(-variable if rng.random() < 0.5 else variable for variable in variables)

    if max_solution_frac is None:
        return num_variables, [draw_clause() for _ in range(num_clauses)]
    solutions = all_assignments(num_variables)  # [S, k]
    most_solutions = max_solution_frac * len(solutions)
    clauses: list[Clause] = []
    # It ends: while two solutions remain, a clause with a variable in which they differ can exclude one of them.
    while len(clauses) < num_clauses or len(solutions) > most_solutions:
        clause = draw_clause()
        literals = np.array(clause)
        values = solutions[:, np.abs(literals) - 1]  # [S, 3]
        kept = solutions[(values == (literals > 0)).any(axis=1)]  # [S', k]
        if len(kept) > 0 and (len(kept) < len(solutions) or len(clauses) < num_clauses):
            clauses.append(clause)
            solutions = kept
    return num_variables, clauses


@lru_cache(maxsize=16)
def all_assignments(num_variables: int) -> NDArray[np.bool_]:
    """[2^k, k] bool: every assignment of k variables. Read-only, because callers share it."""
    codes = np.arange(2**num_variables)
    assignments = (codes[:, None] >> np.arange(num_variables)) & 1 == 1
    assignments.flags.writeable = False
    return assignments
