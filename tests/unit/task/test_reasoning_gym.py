"""Generators of Reasoning Gym: their own answers earn everything, whatever a model writes costs nothing but the
reward."""

import os
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from factories import compose_config

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Task
from offline_grpo.run.build import build
from offline_grpo.run.config import typed
from offline_grpo.run.task_data import task_data
from offline_grpo.types import Split

HOSTILE = [
    "",
    "no answer",
    "<answer></answer>",
    "<answer>\0\ud800</answer>",
    "<answer>[[1,2],[</answer>",
    f"<answer>{'9' * 5000}</answer>",
]


def make(*overrides):
    return build(typed(compose_config("task=reasoning_gym", *overrides)).task, key="task", protocol=Task)


def check_generator(name):
    task, again = (
        make(f"task.name={name}", "task.num_train=40", "task.num_eval=40"),
        make(f"task.name={name}", "task.num_train=40"),
    )
    train, held_out = task.problems(Split.TRAIN), task.problems(Split.EVAL)
    assert train[3] == again.problems(Split.TRAIN)[3]
    assert (train[3].problem_id, held_out[3].problem_id) == ("train-3", "eval-3")
    if train[3].answer:
        score = task.score(train[3], f"It is <answer>0</answer>, no, <answer> {train[3].answer}\n</answer>")
        assert (score.parts, score.is_correct) == ({"correct": 1.0, "format": 0.1}, True)
    for text in HOSTILE:
        score = task.score(held_out[3], text)
        assert score.reward == sum(score.parts.values()) <= 1.1
        assert score.parts["format"] == (0.1 if "<answer>" in text else 0.0)


@pytest.mark.parametrize("name", ["leg_counting", "countdown", "prime_factorization", "rush_hour"])
def test_own_answers_are_right_and_others_are_not_fatal(name):
    check_generator(name)


@pytest.mark.slow
def test_every_generator():
    from reasoning_gym.factory import DATASETS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(DATASETS.keys() - {"composite"}):  # which mixes others, that must be named
            check_generator(name)


@pytest.mark.slow
def test_every_level_of_every_curriculum():
    """Of these three, the library's own curriculum and its checks disagree; `acre` makes all problems at once, which
    takes long.
    """
    from reasoning_gym.factory import CURRICULA

    for name in sorted(CURRICULA.keys() - {"acre", "caesar_cipher", "knight_swap", "survo"}):
        problems = make(
            f"task.name={name}", "task.levels=[0,2]", "task.num_train=4", "task.problems_per_level=1"
        ).problems(Split.TRAIN)
        assert [problem.fields["level"] for problem in problems] == [0, 2, 2, 2], name


def test_training_goes_through_the_levels_and_evaluation_has_all():
    task = make(
        "task.name=gcd", "task.levels=[2,0,1]", "task.problems_per_level=10", "task.num_train=40", "task.num_eval=9"
    )
    assert [problem.fields["level"] for problem in task.problems(Split.TRAIN)] == [2] * 10 + [0] * 10 + [1] * 20
    assert [problem.fields["level"] for problem in task.problems(Split.EVAL)] == [2, 0, 1] * 3
    hard, easy = (
        max(map(len, (problem.messages[-1]["content"] for problem in task.problems(Split.TRAIN)[part])))
        for part in SLICES
    )
    assert hard > easy


SLICES = (slice(0, 10), slice(10, 20))


def test_no_question_of_training_is_held_out():
    """Item i of a data set with seed s is item i - 1 of the one with seed s + 1, in the library."""
    task = make("task.name=simple_equations", "task.seed=1")
    questions = [{problem.messages[-1]["content"] for problem in task.problems(split)[:100]} for split in Split]
    assert not questions[0] & questions[1]
    assert questions[0] != {
        problem.messages[-1]["content"] for problem in make("task.name=simple_equations").problems(Split.TRAIN)[:100]
    }


def test_levels_need_their_order():
    levels = ["task=reasoning_gym", "task.name=gcd", "task.levels=[0,1]", "task.num_train=20"]
    with pytest.raises(ConfigError, match=r"data\.shuffle=true: .*task\.levels.*data\.shuffle=false"):
        task_data(typed(compose_config(*levels)))
    assert len(task_data(typed(compose_config(*levels, "data.shuffle=false"))).train or []) == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.name=leg_countin"], r"task\.name=leg_countin: .* no such generator; it has \d+, such as leg_counting"),
        (["task.settings={legs: 3}"], r"task\.settings=\{'legs': 3\}: leg_counting refuses them: .*legs"),
        (["task.settings={seed: 3}"], r"task\.settings=\['seed'\]: is set by task\.seed"),
        (["task.name=composite"], r"task\.name=composite: use task=mixture"),
        (
            ["task.name=knight_swap", "task.levels=[0]"],
            r"task\.levels=\[0\]: knight_swap refuses them at level 0: min_nodes",
        ),
        (["task.name=gsm_symbolic", "task.levels=[]"], r"task\.levels=\[\]: must be null"),
        (["task.levels=[-1]"], r"task\.levels=\[-1\]"),
        (["task.num_train=0"], r"task\.num_train=0: must be from 1"),
    ],
)
def test_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        make(*overrides).problems(Split.TRAIN)


HERE = """
import pickle, sys
task, problem = pickle.load(sys.stdin.buffer)
problem = problem or task.problems("train")[0]
try:
    outcome = task.score(problem, f"<answer>{problem.answer}</answer>").reward
except Exception as error:
    outcome = f"{type(error).__name__}: {error}"
sys.stdout.buffer.write(pickle.dumps((problem, outcome)))
"""


def in_a_process(hash_seed, task, problem=None):
    """A problem, or the task's first one if there is none, and what its own answer earns in a process whose sets have
    this order.
    """
    asking = pickle.dumps((task, problem))
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return pickle.loads(
        subprocess.run([sys.executable, "-c", HERE], input=asking, env=environment, stdout=-1, check=True).stdout
    )


@pytest.mark.slow
def test_a_problem_that_is_made_again_differently_is_not_scored():
    """The polynomials of `polynomial_multiplication` have variables from a set."""
    task = make("task.name=polynomial_multiplication", "task.system_prompt=Think.", "task.num_train=4")
    problem, earned = in_a_process("0", task)
    assert earned == 1.1
    framed = replace(
        problem, messages=({"role": "user", "content": f"Solve it: {problem.messages[-1]['content']} Go on."},)
    )
    assert [in_a_process("0", task, each)[1] for each in (problem, framed)] == [1.1, 1.1]
    message = r"ScoreError: task=reasoning_gym, .*problem train-0 .*=1\); set PYTHONHASHSEED=0 "
    assert re.match(message, in_a_process("1", task, problem)[1])
