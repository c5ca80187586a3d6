"""The rewards that other trainers give for GSM8K, on texts judged by hand."""

import pytest
from factories import compose_config

from offline_grpo.run.build import build
from offline_grpo.run.config import as_plain
from offline_grpo.types import Problem

PROBLEM = Problem("train-0", ({"role": "user", "content": "?"},), "6 times 12 is 72.\n#### 72")


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("tags", "<think>6 x 12</think><answer>$72.00</answer>", 1.0),
        ("tags", "<answer>71</answer><answer>72</answer>", 0.1),
        ("tags", "<answer></answer>", 0.0),
        ("tags", "72", 0.0),
        ("tags", "<answer>72", 0.0),
        ("boxed", r"<think>\boxed{1}</think> So \boxed{72}", 1.0),
        ("boxed", r"<think>\boxed{72}</think> So 72", -1.0),
        ("boxed", r"\boxed{71}", -1.0),
        ("boxed", "", -1.0),
    ],
)
def test_rewards_of_other_trainers(name, text, reward):
    node = as_plain(compose_config("task=gsm8k", f"task.reward=offline_grpo.task.gsm8k:{name}").task)
    score = build(node, key="task").score(PROBLEM, text)
    assert (score.reward, score.is_correct, dict(score.parts)) == (reward, reward == 1.0, {name: reward})
