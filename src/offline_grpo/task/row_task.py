"""What tasks share whose problems are the rows of a data set, of your own or from the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offline_grpo.errors import ConfigError, require
from offline_grpo.task.problems import check_system_prompt, prompt_key
from offline_grpo.task.rows import Row, check_spec, held_out_split, read_split
from offline_grpo.types import Message, Problem, Split

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowTask(ABC):
    """A task, less `score`, whose subclass says what problem a row is.

    Ids are `train-i` and `eval-i`, where i is the row's number in its split, from 0. The first call of `problems` reads
    the rows, once.

    Args:
        path, name, train_split: see `rows.read_split`.
        eval_split: the split to evaluate on; None is `test` or `validation`, or without these `eval_frac` of the
            rows of `train_split`, those whose prompts come first in the order of a fixed hash, each prompt once.
        system_prompt: the system message, or None for no system message.

    Raises:
        ConfigError: a value is malformed. `problems` raises it if the data cannot be read or a row is malformed.
    """

    path: str
    name: str | None
    train_split: str
    eval_split: str | None
    eval_frac: float
    system_prompt: str | None

    def __post_init__(self) -> None:
        require(
            bool(self.path.strip()), "task.path", repr(self.path), "set it to a local file or folder, or to a Hub id"
        )
        check_spec("task.train_split", self.train_split)
        if self.eval_split is not None:
            check_spec("task.eval_split", self.eval_split)
        require(0 < self.eval_frac < 1, "task.eval_frac", self.eval_frac, "must lie strictly between 0 and 1")
        check_system_prompt(self.system_prompt)

    @abstractmethod
    def problem_of(self, problem_id: str, row: Row) -> Problem:
        """The problem of a row. Raises ConfigError where the row is malformed."""

    def asked_by(self, row: Row, problem: Problem) -> Sequence[Message]:
        """What the row itself says, without what settings add to it: these must not change which rows are held out."""
        return problem.messages if self.system_prompt is None else problem.messages[1:]

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in the order of the data."""
        return self._splits[split]

    def messages(self, row: Row, prompt: Sequence[Message]) -> tuple[Message, ...]:
        """The prompt, after the system message.

        Raises:
            ConfigError: the prompt has a system message of its own.
        """
        if self.system_prompt is None:
            return tuple(prompt)
        if prompt[0]["role"] == "system":
            raise ConfigError(
                f"task.system_prompt={self.system_prompt!r}: {row.where} has a system message of its own; set it "
                "to null"
            )
        return ({"role": "system", "content": self.system_prompt}, *prompt)

    @cached_property
    def _splits(self) -> Mapping[Split, Sequence[Problem]]:
        rows, train = self._load(self.train_split, Split.TRAIN)
        spec = self.eval_split or held_out_split(self.path, self.name)
        if spec is not None:
            return {Split.TRAIN: train, Split.EVAL: self._load(spec, Split.EVAL)[1]}
        # all rows with the same prompt are on the same side, whatever their order and whatever is added
        hashes = [_hash_of(self.asked_by(row, problem)) for row, problem in zip(rows, train, strict=True)]
        different = sorted(set(hashes))
        if len(different) < 2:
            raise ConfigError(f"task.path={self.path}: has {len(different)} different prompts; it needs 2 or more")
        chosen = set(different[: max(1, round(self.eval_frac * len(different)))])
        held_out: dict[str, Problem] = {}  # each prompt once: copies would count as independent answers
        for key, problem in zip(hashes, train, strict=True):
            if key in chosen:
                held_out.setdefault(key, problem)
        left = [problem for key, problem in zip(hashes, train, strict=True) if key not in chosen]
        counts = len(held_out), len(train), self.eval_frac
        log.info("held out: %d of %d rows, without a split for it (task.eval_frac=%s)", *counts)
        if copies := len(train) - len(left) - len(held_out):
            log.info("left out, of training too: %d copies of prompts that are held out", copies)
        return {Split.TRAIN: left, Split.EVAL: list(held_out.values())}

    def _load(self, spec: str, split: Split) -> tuple[list[Row], list[Problem]]:
        rows = read_split(self.path, self.name, spec, f"task.{split}_split")
        problems = [self.problem_of(f"{split}-{row.index}", row) for row in rows]
        if pairs := _contradictions(problems):
            log.warning(
                "%d rows of task.%s_split=%s ask what an earlier row asks and have another answer, such as %s "
                "and %s: a completion that is "
                "right for one is wrong for the other",
                *(len(pairs), split, spec, *pairs[0]),
            )
        return rows, problems


def _contradictions(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Ids of problems with the same prompt and other answers: the first one with it, and each that differs from
    that."""
    first: dict[tuple[tuple[str, str], ...], Problem] = {}
    pairs = ((first.setdefault(prompt_key(problem), problem), problem) for problem in problems)
    return [(one.problem_id, other.problem_id) for one, other in pairs if one.answer != other.answer]


def _hash_of(messages: Sequence[Message]) -> str:
    content = "\0".join(f"{message['role']}\0{message['content']}" for message in messages)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
