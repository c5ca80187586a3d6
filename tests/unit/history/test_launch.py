"""The number of processes that `accelerate launch` was asked for."""

import pytest

from offline_grpo.history.launch import asked_for


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /venv/bin/accelerate launch --num_processes 2 run_grpo.py train.lr=1", 2),
        ("python /venv/bin/accelerate-launch --cpu --num-processes=3 run_grpo.py", 3),
        ("python /venv/bin/accelerate launch run_grpo.py", 1),
        ("python run_grpo.py --num_processes 2", 1),
    ],
)
def test_number_of_processes(command, expected):
    assert asked_for(command.split()) == expected
