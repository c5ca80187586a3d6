"""A fact among many alike, or a chain of them: retrieval at any length, after RULER's keys and variable tracking (arXiv
2404.06654). Problems are generated from seeds, without limit and without data files.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, ClassVar

from offline_grpo.settings import at_least
from offline_grpo.task.answers import last_plain_number
from offline_grpo.task.problems import MANY, BaseTask, LazyProblems, SystemPrompt, asked
from offline_grpo.types import Problem, Score, Split

COLOURS = "amber azure beige black blue bronze brown coral cream gold green grey jade lilac lime navy olive pink red"
ANIMALS = "ant bat bear bee boar cat cow crab crow deer dog dove duck eel elk fox frog goat goose hare hawk hen horse"
NAMES = [f"{colour} {animal}" for colour in COLOURS.split() for animal in ANIMALS.split()]
FACT_WORDS, LINK_WORDS = 7, 10
"""Of `The number of amber fox is 4821.` and of `The number of jade owl is that of amber fox.`"""


@dataclass(frozen=True, kw_only=True)
class Needle(BaseTask):
    """Facts in any order, and a question about one. The answer is `hops` facts away: the one that is asked for refers
    to another, and the last one says a number of four digits. All others are parts of such chains, too. The reward is 1
    if the last number of a completion is the right one.
    """

    num_words: Annotated[int, at_least(FACT_WORDS)]
    hops: Annotated[int, at_least(1)]
    system_prompt: SystemPrompt

    scores_safely: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self._most_words(1)
        self.check(
            "num_words", self.num_words >= least, f"must be at least {least}, the words of task.hops={self.hops}"
        )

    def _most_words(self, num_chains: int) -> int:
        """Of so many chains. Names beyond `NAMES` end in a number, which is a word. A name is there twice, but for the
        last one of each chain, and `NAMES` are the last ones of as many chains as they can be.
        """
        num_numbered = max(0, num_chains * self.hops - len(NAMES))
        of_numbers = 2 * num_numbered - max(0, num_chains - len(NAMES))
        return num_chains * (FACT_WORDS + (self.hops - 1) * LINK_WORDS) + of_numbers

    @cached_property
    def num_chains(self) -> int:
        """For which there is room, whatever names they draw."""
        return bisect_right(range(1, self.num_words), self.num_words, key=self._most_words)

    @cached_property
    def _names(self) -> list[str]:
        """Of all facts, each with a name of its own."""
        numbers = range(max(len(NAMES), self.num_chains * self.hops))
        return [NAMES[n % len(NAMES)] + (f" {n // len(NAMES)}" if n >= len(NAMES) else "") for n in numbers]

    def problems(self, split: Split) -> LazyProblems:
        """The first 10^9 problems of a split, generated when indexed; ids are `needle-i` and `needle-eval-i`."""
        return LazyProblems(partial(self._problem, "" if split is Split.TRAIN else "eval-"), range(MANY))

    def _problem(self, prefix: str, index: int) -> Problem:
        rng = random.Random(f"needle {self.num_words} {self.hops} {prefix}{index}")
        names = rng.sample(self._names, self.num_chains * self.hops)
        facts, asked_for = [], rng.randrange(self.num_chains)
        question = answer = ""
        for number_of_chain in range(self.num_chains):
            chain = names[number_of_chain * self.hops : (number_of_chain + 1) * self.hops]
            number = rng.randrange(1000, 10_000)
            facts.append(f"The number of {chain[0]} is {number}.")
            facts += [f"The number of {name} is that of {before}." for before, name in pairwise(chain)]
            if number_of_chain == asked_for:
                question, answer = chain[-1], str(number)
        rng.shuffle(facts)
        prompt = f"{' '.join(facts)}\n\nWhat is the number of {question}? Answer with the number alone."
        return Problem(f"needle-{prefix}{index}", asked(prompt, self.system_prompt), answer)

    def score(self, problem: Problem, text: str) -> Score:
        is_correct = last_plain_number(text) == problem.answer
        return Score(float(is_correct), is_correct, {"correctness": float(is_correct)})
