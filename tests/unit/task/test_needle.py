"""Facts that lead to the answer, and to no other."""

from __future__ import annotations

import re

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.task.needle import Needle
from offline_grpo.types import Split


def make(num_words: int = 400, hops: int = 1) -> Needle:
    return Needle(num_words=num_words, hops=hops, system_prompt=None)


def followed(prompt: str) -> tuple[str, int]:
    """The number that the facts say, read one after the other, and how many it took."""
    facts = dict(re.findall(r"The number of ([a-z]+ [a-z]+(?: \d+)?) is (?:that of )?([^.]+)\.", prompt))
    [name] = re.findall(r"What is the number of ([^?]+)\?", prompt)
    steps = 0
    while not name.isdecimal():
        name, steps = facts[name], steps + 1
    return name, steps


@pytest.mark.parametrize(("num_words", "hops"), [(7, 1), (400, 1), (400, 4), (27, 3), (50_000, 2)])
def test_the_facts_lead_to_the_answer(num_words: int, hops: int) -> None:
    task = make(num_words, hops)
    for split in Split:
        for problem in task.problems(split)[: 3 if num_words > 1000 else 30]:
            prompt = problem.messages[-1]["content"]
            assert followed(prompt) == (problem.answer, hops)
            names = re.findall(r"The number of ([^.]+?) is ", prompt)
            assert len(names) == len(set(names)) == task.num_chains * hops
            words = len(prompt.partition("\n")[0].split())
            assert 0.9 * num_words < words <= num_words


@pytest.mark.parametrize(("num_words", "num_facts"), [(3059, 437), (3066, 437), (3067, 438), (40_000, 5054)])
def test_a_text_has_as_many_facts_as_it_has_room_for(num_words: int, num_facts: int) -> None:
    # 437 names have two words; a fact about one of the others has eight words instead of seven
    prompt = make(num_words).problems(Split.TRAIN)[0].messages[-1]["content"]
    assert len(re.findall(r"The number of", prompt)) == num_facts


def test_problems_differ_and_stay_as_they_are() -> None:
    task = make()
    train, held_out = task.problems(Split.TRAIN), task.problems(Split.EVAL)
    prompts = {str(problem.messages) for problem in (*train[:50], *held_out[:50])}
    assert len(prompts) == 100
    assert train[7] == make().problems(Split.TRAIN)[7]
    assert len({problem.answer for problem in train[:50]}) > 40


def test_the_last_number_counts() -> None:
    task = make()
    problem = task.problems(Split.TRAIN)[0]
    right = problem.answer, f"It is {problem.answer}.", f"{int(problem.answer):,}"
    for text, reward in (*((text, 1) for text in right), (f"{problem.answer} or 7", 0), ("", 0)):
        score = task.score(problem, text)
        assert (score.reward, score.is_correct) == (reward, bool(reward))


def test_a_chain_must_have_room() -> None:
    with pytest.raises(ConfigError, match=r"task.num_words=20: must be at least 27, the words of task.hops=3"):
        make(20, 3)
    # 438 names, of which one is numbered and may be there twice: 7 + 437 * 10 + 2
    with pytest.raises(ConfigError, match=r"task.num_words=400: must be at least 4379, the words of task.hops=438"):
        make(400, 438)
    assert followed(make(4379, 438).problems(Split.TRAIN)[0].messages[-1]["content"])[1] == 438
