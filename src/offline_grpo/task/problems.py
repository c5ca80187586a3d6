"""Problems: their messages, sequences of them without end, and those held out that training has in almost the same
words."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, Any, ClassVar

from offline_grpo.settings import Group, Range
from offline_grpo.types import Message, Problem, Split, text_of

MANY = 10**9
"""How many problems a task says it has that makes them without end."""
HALF = "has half of a character (a surrogate pair that was cut, such as \\ud83d); replace or remove it"
NUM_WORDS, MIN_SHARE = 8, 0.5
"""See `near_duplicates`."""


@dataclass(frozen=True, slots=True)
class LazyProblems(Sequence[Problem]):
    """Problems made on demand: `make(i)` for each i of `indices`. Slices are lazy too."""

    make: Callable[[int], Problem]
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        chosen = self.indices[index]
        return LazyProblems(self.make, chosen) if isinstance(chosen, range) else self.make(chosen)


def is_whole(value: object) -> bool:
    """Whether texts, also in lists and dicts, have no half of a surrogate pair, which no tokenizer takes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="ignore").decode() == text


SystemPrompt = Annotated[
    str | None,
    Range("is blank; set it to null to send no system message", lambda text: bool(text.strip())),
    Range(HALF, is_whole),
]
Share = Annotated[float, Range("must lie strictly between 0 and 1", lambda value: 0 < value < 1)]
FormatWeight = Annotated[
    float, Range("must be at least 0 and below 1, the weight of a correct answer", lambda value: 0 <= value < 1)
]
Weight = Annotated[float, Range("must be 0 or more, and finite", lambda value: 0 <= value < inf)]


class BaseTask(Group):
    """Checks settings, each against the range in its type. A task has all its problems in `_splits`, or a method
    `problems` of its own.
    """

    key: ClassVar[str] = "task"

    @cached_property
    def _splits(self) -> Mapping[Split, Sequence[Problem]]:
        raise NotImplementedError

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order."""
        return self._splits[split]


def prompt_key(problem: Problem) -> str:
    """Equal for problems that ask the same. An environment asks what it makes of a row."""
    row = {} if problem.rules is None else dict(problem.fields)
    asked = [*map(dict, problem.messages), *(picture.key for picture in problem.pictures), row]
    return json.dumps(asked, sort_keys=True, default=str)


def asked(prompt: str, system_prompt: str | None) -> tuple[Message, ...]:
    """The user's message, after the system message if there is one."""
    system: tuple[Message, ...] = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    return (*system, {"role": "user", "content": prompt})


def hash_frac(text: str) -> float:
    """A number in [0, 1) that depends only on the text; it is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


@dataclass(frozen=True)
class NearDuplicate:
    """`share` of a held-out problem's word sequences, in [0, 1], are in one training problem."""

    held_out_id: str
    train_id: str
    share: float


def near_duplicates(train: Iterable[Problem], held_out: Sequence[Problem]) -> list[NearDuplicate]:
    """Held-out problems of whose sequences of 8 words more than half are in the same training problem.

    That is the rule of Tülu 3 (arXiv 2411.15124, section 3.2) but for two things: it counts the words in such
    sequences, and here words that more than half of the held-out problems have do not count. Nor do letter case and the
    punctuation of prose; a sign such as + is a word. Problems are left out if fewer than 8 of their words count, or
    less than half, because then a template wrote them.

    Takes 0.3 s for 5,000 word problems.
    """

    def words_of(problem: Problem) -> list[str]:
        if problem.pictures:  # which may be all the difference
            return []
        text = " ".join(text_of(message) for message in problem.messages if message["role"] != "system")
        return re.findall(r"\w+|[^\w\s.,;:!?'\"()]", text.lower())

    # Words that most held-out problems have do not count; a text of which little is left has no sequence.
    num_problems = Counter(word for problem in held_out for word in set(words_of(problem)))
    common = {word for word, count in num_problems.items() if count > max(2, len(held_out) / 2)}

    def sequences_of(problem: Problem) -> set[tuple[str, ...]]:
        words = words_of(problem)
        kept = [word for word in words if word not in common]
        if len(kept) < len(words) / 2:
            return set()
        return {tuple(kept[start : start + NUM_WORDS]) for start in range(len(kept) - NUM_WORDS + 1)}

    # Where each sequence is, and for each held-out problem the training problem that shares most.
    sequences = [sequences_of(problem) for problem in held_out]
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, own in enumerate(sequences):
        for each in own:
            places[each].append(index)
    best: dict[int, NearDuplicate] = {}
    for problem in train if places else ():
        shared = sequences_of(problem) & places.keys()
        for index, count in Counter(index for each in shared for index in places[each]).items():
            share = count / len(sequences[index])
            if share > MIN_SHARE and (index not in best or share > best[index].share):
                best[index] = NearDuplicate(held_out[index].problem_id, problem.problem_id, share)
    return [best[index] for index in sorted(best)]
