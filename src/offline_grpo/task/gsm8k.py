"""What other trainers reward GSM8K with, as reward functions: `task=gsm8k task.reward=offline_grpo.task.gsm8k:tags`."""

from __future__ import annotations

from offline_grpo.task.answers import is_same_number, last_boxed, reference_answer, tagged_blocks

WRONG_IN_TAGS = 0.1
"""TorchRL's reward of a wrong answer in its place."""


def tags(completion: str, answer: str) -> float:
    """TorchRL's: 1 for the right number in the first `<answer>` block, 0.1 for something else in it, 0 without one."""
    given = next(iter(tagged_blocks(completion, "answer")), "").strip()
    if not given:
        return 0.0
    return 1.0 if is_same_number(reference_answer(answer), given) else WRONG_IN_TAGS


def boxed(completion: str, answer: str) -> float:
    r"""Atropos': 1 for the right number in the last `\boxed{}` after the last `</think>`, otherwise -1."""
    given = last_boxed(completion.rpartition("</think>")[2])
    return 1.0 if given is not None and is_same_number(reference_answer(answer), given) else -1.0
