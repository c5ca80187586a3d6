"""Generators of Reasoning Gym: their own answers earn everything, whatever a model writes costs nothing but the
reward."""

import warnings

import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task, task_data
from offline_grpo.errors import ConfigError
from offline_grpo.types import Split

HOSTILE = ["no answer", *(f"<answer>{text}</answer>" for text in ("", "\0\ud800", "[[1,2],[", "9" * 5000))]


def make(*overrides):
    return build_task(typed(compose_config("task=reasoning_gym", *overrides)).task)


def check_generator(name):
    task, again = (make(f"task.name={name}", "task.num_train=40", "task.num_eval=40") for _ in range(2))
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


@pytest.mark.parametrize("name", ["leg_counting", "rush_hour"])
def test_own_answers_are_right_and_others_are_not_fatal(name):
    check_generator(name)


def test_the_answer_is_where_the_task_says():
    for where, right in {
        "last_number": "3 and 1? It is 1,{}.",
        "completion": " 1{}\n",
        "tag": "<answer>1{}</answer>",
    }.items():
        task = make("task.name=chain_sum", "task.settings={min_terms: 3, min_digits: 3}", f"task.answer_in={where}")
        problem = next(each for each in task.problems(Split.TRAIN) if each.answer[0] == "1" and len(each.answer) == 4)
        assert task.score(problem, right.format(problem.answer[1:])).parts == {"correct": 1.0, "format": 0.1}
        elsewhere = task.score(problem, f"{problem.answer} <answer>{problem.answer}</answer> 3")
        assert elsewhere.is_correct == (where == "tag")


@pytest.mark.slow
def test_every_fourth_generator():
    from reasoning_gym.factory import DATASETS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(DATASETS.keys() - {"composite"})[::4]:
            check_generator(name)


def test_training_goes_through_the_levels_and_evaluation_has_all():
    task = make(
        "task.name=gcd", "task.levels=[2,0,1]", "task.problems_per_level=10", "task.num_train=40", "task.num_eval=9"
    )
    assert [problem.fields["level"] for problem in task.problems(Split.TRAIN)] == [2] * 10 + [0] * 10 + [1] * 20
    assert [problem.fields["level"] for problem in task.problems(Split.EVAL)] == [2, 0, 1] * 3
    questions = [problem.messages[-1]["content"] for problem in task.problems(Split.TRAIN)]
    assert max(map(len, questions[:10])) > max(map(len, questions[10:20]))


def test_no_question_of_training_is_held_out():
    """Item i of a data set with seed s is item i - 1 of the one with seed s + 1, in the library."""
    task = make("task.name=simple_equations", "task.seed=1")
    questions = [{problem.messages[-1]["content"] for problem in task.problems(split)[:100]} for split in Split]
    assert not questions[0] & questions[1]


def test_levels_need_their_order():
    levels = ["task=reasoning_gym", "task.name=gcd", "task.levels=[0,1]", "task.num_train=20"]
    with pytest.raises(ConfigError, match=r"data\.shuffle=true: .*task\.levels.*data\.shuffle=false"):
        task_data(typed(compose_config(*levels)))
    assert len(task_data(typed(compose_config(*levels, "data.shuffle=false"))).train or []) == 20
