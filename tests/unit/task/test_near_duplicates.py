"""Held-out problems that training has in almost the same words are found; those of a template are not."""

import pytest

from offline_grpo.task.problems import NearDuplicate, near_duplicates
from offline_grpo.types import Problem

ROPE = (
    "A sailor cuts a rope of twelve metres into pieces, the first twice as long as the second. "
    "How long is the shorter piece?"
)
BREAD = (
    "Bakers in Lyon sold forty loaves before noon and half as many after lunch; every loaf weighs 800 g. "
    "What did all of them weigh?"
)


def problem(problem_id, text, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return Problem(problem_id, (*messages, {"role": "user", "content": text}), "1")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (ROPE, 1.0),
        (ROPE.upper().replace(",", " -").replace("?", " !").replace(" -", ","), 1.0),
        ("Once upon a time in Brest: " + ROPE.removesuffix("How long is the shorter piece?"), 11 / 17),
        (ROPE.replace("rope", "cable").replace("first", "one").replace("second", "other"), None),
        ("A sailor cuts a rope of twelve metres into pieces.", None),  # 3 of 16 sequences
    ],
)
def test_pairs(text, share):
    found = near_duplicates([problem("other", BREAD), problem("train-7", text)], [problem("eval-1", ROPE)])
    assert found == ([] if share is None else [NearDuplicate("eval-1", "train-7", pytest.approx(share))])


def test_the_closest_is_named_and_system_messages_do_not_count():
    half = problem("half", " ".join(ROPE.split()[:18]), "words " * 9)
    train = [half, problem("whole", ROPE, "words " * 9), half, problem("same system", BREAD[:60], "words " * 9)]
    assert near_duplicates(train, [problem("e", ROPE, "words " * 9)]) == [NearDuplicate("e", "whole", 1.0)]


def test_what_a_template_wrote_is_not_a_duplicate():
    template = (
        "Using the numbers {}, {} and {}, create an equation that equals {}. "
        "Use each number once and show how you got there."
    )
    held_out = [problem(f"e{i}", template.format(i, i + 1, i + 2, 100 + i)) for i in range(20)]
    assert (
        near_duplicates([problem(f"t{i}", template.format(i, i + 3, i + 5, 100 + i)) for i in range(20)], held_out)
        == []
    )
