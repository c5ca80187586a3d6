"""Problems that a task of the user's own may give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import held_out_problems, train_problems
from offline_grpo.errors import ConfigError
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
