"""Problems that a task of the user's own may give."""

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


def test_an_answer_that_is_no_text_is_refused() -> None:
    """It would equal no completion: every reward would be 0."""
    config = typed(compose_config("data.num_train_seeds=null", "eval.num_ids=all"))
    for wrong in ("1+1=", Problem("p", MESSAGES, 2)):  # type: ignore[arg-type]
        task: Any = SimpleNamespace(problems=lambda _, wrong=wrong: [wrong])
        for choose in (train_problems, held_out_problems):
            with pytest.raises(ConfigError, match=r"^task: problems\(\) has "):
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
