"""The rewards that other trainers give for GSM8K, on texts judged by hand."""

import pytest
from factories import compose_config

from offline_grpo.config.compose import as_plain
from offline_grpo.config.problems import build_task
from offline_grpo.types import Problem

PROBLEM = Problem("train-0", ({"role": "user", "content": "?"},), "6 times 12 is 72.\n#### 72")
WORKING = "<start_working_out>6 x 12</end_working_out>"
GRAIL = ("correctness", "strict_format", "thinking", "answer", "no_trailing")


@pytest.mark.parametrize(
    ("name", "text", "parts", "is_correct"),
    [
        ("tags", "<think>6 x 12</think><answer>$72.00</answer>", 1.0, True),
        ("tags", "<answer>71</answer><answer>72</answer>", 0.1, False),
        ("tags", "<answer>72", 0.0, False),
        ("boxed", r"<think>\boxed{1}</think> So \boxed{72}", 1.0, True),
        ("boxed", r"<think>\boxed{72}</think> So 72", -1.0, False),
        ("boxed", r"\boxed{71}", -1.0, False),
        ("weighted", f"{WORKING}<SOLUTION>72</SOLUTION>", (0.6, 0.045, 0.05, 0.03, 0.01), True),
        ("weighted", "<SOLUTION>it is 72</SOLUTION>", (0.6, 0, 0, 0.03, 0.01), True),
        ("weighted", "<SOLUTION>72</SOLUTION>" + "." * 50, (0.6, 0, 0, 0.03, 0.0075), True),
        ("weighted", f"{WORKING}<SOLUTION>71</SOLUTION>", (0, 0.045, 0.05, 0.03, 0.01), False),
        ("weighted", f"{WORKING}<solution>none</solution>" + "." * 500, (0, 0, 0.05, 0.03, 0), False),
        ("weighted", "</end_working_out><start_working_out>72", (0, 0, 0, 0, 0), False),
    ],
)
def test_rewards_of_other_trainers(name, text, parts, is_correct):
    words = [
        f"task.reward=offline_grpo.task.gsm8k:{name}",
        f"task.correct_threshold={0.6 if name == 'weighted' else 1}",
    ]
    score = build_task(as_plain(compose_config("task=gsm8k", *words).task)).score(PROBLEM, text)
    of_dict = (
        {f"weighted/{part}": value for part, value in zip(GRAIL, parts, strict=True)} if name == "weighted" else {}
    )
    assert dict(score.parts) == pytest.approx(of_dict or {name: parts})
    assert (score.reward, score.is_correct) == (pytest.approx(sum(score.parts.values())), is_correct)
