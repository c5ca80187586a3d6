"""What other trainers reward GSM8K with, as reward functions: `task=gsm8k task.reward=offline_grpo.task.gsm8k:tags`."""

from __future__ import annotations

import re

from offline_grpo.task.answers import (
    is_same_value,
    last_boxed,
    last_number,
    last_tagged,
    reference_answer,
    tagged_blocks,
)

WRONG_IN_TAGS = 0.1
"""TorchRL's reward of a wrong answer in its place."""
_NUMBER = re.compile(r"[-+]?[\d.,]*\d")


def tags(completion: str, answer: str) -> float:
    """TorchRL's: 1 for the right number in the first `<answer>` block, 0.1 for something else in it, 0 without one."""
    given = next(iter(tagged_blocks(completion, "answer")), "").strip()
    if not given:
        return 0.0
    return 1.0 if is_same_value(reference_answer(answer), given) else WRONG_IN_TAGS


def boxed(completion: str, answer: str) -> float:
    r"""Atropos': 1 for the right number in the last `\boxed{}` after the last `</think>`, otherwise -1."""
    given = last_boxed(completion.rpartition("</think>")[2])
    return 1.0 if given is not None and is_same_value(reference_answer(answer), given) else -1.0


def weighted(completion: str, answer: str) -> dict[str, float]:
    """grail's: weighted parts, from 0 to 0.735. With `task.correct_threshold=0.6`, right is what has the right number.

    correctness     0.6 if the last number in the last `<SOLUTION>` block is right
    strict_format   0.15 x 0.3 if nothing else is in that block, and nothing follows it
    thinking        0.1 x 0.5 if there is a block from `<start_working_out>` to `</end_working_out>`
    answer          0.1 x 0.3 if there is a `<SOLUTION>` block
    no_trailing     0.05 x max(0, 0.2 - 0.001 x characters after the block); 0 without a block
    """
    block = last_tagged(completion, "SOLUTION")
    content, trailing = (block.content.strip(), block.num_trailing_chars) if block is not None else ("", 0)
    number = last_number(content)
    working = re.search(r"<start_working_out>", completion, re.IGNORECASE)
    has_worked = working is not None and "</end_working_out>" in completion[working.end() :].lower()
    return {
        "correctness": 0.6 * (number is not None and is_same_value(reference_answer(answer), number)),
        "strict_format": 0.15 * 0.3 * (_NUMBER.fullmatch(content) is not None and trailing == 0),
        "thinking": 0.1 * 0.5 * has_worked,
        "answer": 0.1 * 0.3 * (block is not None),
        "no_trailing": 0.05 * max(0.0, 0.2 - 0.001 * trailing) if block is not None else 0.0,
    }
