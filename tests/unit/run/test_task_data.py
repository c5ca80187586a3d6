"""What a task of the user's own may hand over as problems."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from factories import compose_config

from offline_grpo.errors import ConfigError
from offline_grpo.run.config import typed
from offline_grpo.run.task_data import held_out_problems, train_problems
from offline_grpo.task.problems import MANY, LazyProblems
from offline_grpo.types import Problem

MESSAGES = ({"role": "user", "content": "1+1="},)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ((each for each in ()), r"^task: problems\(\) returned a generator; it must be a list, or another sequence$"),
        (["1+1="], r"^task: problems\(\) has '1\+1='; its items must be offline_grpo.types.Problem$"),
        ([Problem("p", MESSAGES, 2)], r"^task: problem 'p' has answer=2; it must be text$"),
        (
            [Problem("p", "1+1=", "2")],
            r"^task: problem 'p' has messages='1\+1='; they must be like \(\{'role': 'user', ",
        ),
        ([Problem("p", ({"content": "1+1="},), "2")], r"^task: problem 'p' has messages=.*; they must be like "),
    ],
)
def test_what_is_no_problem_is_refused(problems: Any, message: str) -> None:
    task: Any = SimpleNamespace(problems=lambda _: problems)
    config = typed(compose_config("data.num_train_seeds=null", "eval.num_ids=all"))
    for choose in (train_problems, held_out_problems):
        with pytest.raises(ConfigError, match=message):
            choose(task, config)


def test_a_long_task_is_not_taken_for_one_without_end() -> None:
    """A mixture of very uneven shares is as long as it takes to ask every problem of the smallest share."""
    task: Any = SimpleNamespace(
        problems=lambda _: LazyProblems(lambda i: Problem(f"p{i}", MESSAGES, "2"), range(1_800_000))
    )
    with pytest.raises(
        ConfigError,
        match=r"1,800,000 problems are more than 1,000,000; set data\.num_train_seeds to a number below that",
    ):
        train_problems(task, typed(compose_config("data.num_train_seeds=null")))
    assert len(train_problems(task, typed(compose_config("data.num_train_seeds=100")))) == 100
    task.problems = lambda _: LazyProblems(lambda i: Problem(f"p{i}", MESSAGES, "2"), range(MANY))
    assert len(train_problems(task, typed(compose_config("data.num_train_seeds=null")))) == 10_000
