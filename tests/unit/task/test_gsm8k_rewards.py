"""The rewards that other trainers give for GSM8K, on texts judged by hand."""

import pytest
from factories import compose_config

from offline_grpo.config.compose import as_plain
from offline_grpo.config.problems import build_task
from offline_grpo.types import Problem

PROBLEM = Problem("train-0", ({"role": "user", "content": "?"},), "6 times 12 is 72.\n#### 72")


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("tags", "<think>6 x 12</think><answer>$72.00</answer>", 1.0),
        ("tags", "<answer>71</answer><answer>72</answer>", 0.1),
        ("tags", "<answer>72", 0.0),
        ("boxed", r"<think>\boxed{1}</think> So \boxed{72}", 1.0),
        ("boxed", r"<think>\boxed{72}</think> So 72", -1.0),
        ("boxed", r"\boxed{71}", -1.0),
    ],
)
def test_rewards_of_other_trainers(name, text, reward):
    node = as_plain(compose_config("task=gsm8k", f"task.reward=offline_grpo.task.gsm8k:{name}").task)
    score = build_task(node).score(PROBLEM, text)
    assert (score.reward, score.is_correct, dict(score.parts)) == (reward, reward == 1.0, {name: reward})


WORKING = "<start_working_out>6 x 12</end_working_out>"


@pytest.mark.parametrize(
    ("text", "parts", "is_correct"),
    [  # correctness, strict_format, thinking, answer, no_trailing
        (f"{WORKING}<SOLUTION>72</SOLUTION>", (0.6, 0.045, 0.05, 0.03, 0.01), True),
        ("<SOLUTION>it is 72</SOLUTION>", (0.6, 0, 0, 0.03, 0.01), True),
        ("<SOLUTION>72</SOLUTION>" + "." * 50, (0.6, 0, 0, 0.03, 0.0075), True),
        (f"{WORKING}<SOLUTION>71</SOLUTION>", (0, 0.045, 0.05, 0.03, 0.01), False),
        (f"{WORKING}<solution>none</solution>" + "." * 500, (0, 0, 0.05, 0.03, 0), False),
        ("</end_working_out><start_working_out>72", (0, 0, 0, 0, 0), False),
    ],
)
def test_grails_reward_is_a_sum_of_weighted_parts(text, parts, is_correct):
    node = as_plain(
        compose_config("task=gsm8k", "task.reward=offline_grpo.task.gsm8k:weighted", "task.correct_threshold=0.6").task
    )
    score = build_task(node).score(PROBLEM, text)
    names = ("correctness", "strict_format", "thinking", "answer", "no_trailing")
    assert dict(score.parts) == pytest.approx(
        {f"weighted/{name}": part for name, part in zip(names, parts, strict=True)}
    )
    assert score.reward == pytest.approx(sum(parts))
    assert score.is_correct == is_correct
