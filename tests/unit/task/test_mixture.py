"""Several tasks as one: shares, order, splits, scores and metrics."""

from collections import Counter
from dataclasses import replace

import pytest
from factories import make_group

from offline_grpo.task.mixture import Mixture
from offline_grpo.train.metrics import rollout_metrics
from offline_grpo.types import Problem, Score, Split, by_task


class Numbers:
    """Problems 0 .. n-1 and as many held out."""

    def __init__(self, num_train, num_eval=2):
        self._numbers = {Split.TRAIN: num_train, Split.EVAL: num_eval}

    def problems(self, split):
        return [
            Problem(f"{split}-{i}", ({"role": "user", "content": f"{i}"},), str(i)) for i in range(self._numbers[split])
        ]

    def score(self, problem, text):
        return Score(
            float(text == problem.answer), text == problem.answer, {problem.problem_id: float(text == problem.answer)}
        )


def ids(task, split):
    return [problem.problem_id for problem in task.problems(split)]


def test_shares_are_met_throughout_and_small_tasks_come_again():
    task = Mixture(
        tasks={"a": Numbers(6000), "b": Numbers(10), "c": Numbers(4)}, weights={"a": 0.6, "b": 0.3, "c": 0.1}
    )
    found = ids(task, Split.TRAIN)
    assert set(found) == {f"{name}::train-{i}" for name, n in (("a", 6000), ("b", 10), ("c", 4)) for i in range(n)}
    assert len(found) == 10000  # until the last problem of a was there
    assert found[-1] == "a::train-5999"
    for end in (10, 50, 999, 1000, 4321, 10000):
        counts = Counter(name.partition("::")[0] for name in found[:end])
        for name, weight in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
            assert abs(counts[name] - weight * end) < 1.5
    of_b = [name for name in found if name.startswith("b::")]
    assert of_b[:21] == [f"b::train-{i % 10}" for i in range(21)]


def test_held_out_problems_come_once_in_turn():
    task = Mixture(
        tasks={"a": Numbers(1, 3), "b": Numbers(1, 1), "c": Numbers(1, 2)}, weights={"a": 0.8, "b": 0.1, "c": 0.1}
    )
    assert ids(task, Split.EVAL) == ["a::eval-0", "b::eval-0", "c::eval-0", "a::eval-1", "c::eval-1", "a::eval-2"]
    with pytest.raises(IndexError):
        task.problems(Split.EVAL)[6]


def test_a_score_is_that_of_the_problems_task():
    task = Mixture(tasks={"a": Numbers(3), "b": Mixture(tasks={"c": Numbers(3)}, weights=None)}, weights=None)
    for problem in task.problems(Split.TRAIN):
        assert task.score(problem, problem.answer).reward == 1
        assert set(task.score(problem, "x").parts) == {problem.problem_id.rpartition("::")[2]}
    assert {problem.task for problem in task.problems(Split.TRAIN)} == {"a", "b"}


def groups_of(*rewards):
    found = []
    for name, values in rewards:
        group = make_group(*(("x", value) for value in values))
        found.append(replace(group, problem=replace(group.problem, problem_id=f"{name}::1")))
    return found


def test_metrics_are_there_for_each_task_and_the_whole():
    groups = groups_of(("b", [1.0, 0.0]), ("a", [1.0, 1.0]), ("b", [0.0, 0.0]), ("a", [1.0, 0.0]))
    assert {name: len(own) for name, own in by_task(groups).items()} == {"a": 2, "b": 2}
    trained = rollout_metrics(groups)
    assert (trained["reward_mean"], trained["task/a/reward_mean"], trained["task/b/reward_mean"]) == (0.5, 0.75, 0.25)
