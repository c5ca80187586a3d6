"""What the model reads and writes: a few completions of every iteration in files, and of every evaluation on the
console; once, the first prompt and completion, and special tokens that rewards do not see.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby, pairwise
from math import inf
from pathlib import Path
from textwrap import indent, wrap
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo.disk import write_whole
from offline_grpo.formats import significant, utf8
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import output_console, suffix_of
from offline_grpo.settings import Group, Range, at_least
from offline_grpo.types import Message, Rollout, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Advantages = Sequence[Sequence[float | None]]
"""The advantage of each rollout of each group, None without a reward; of one that has an advantage per token, their
mean.
"""
Decode = Callable[[Sequence[int]], str]
"""The text of token ids, with special tokens."""

POLICY = "policy"
_NUMBER = Range("a number, 0 for none, or all", lambda n: n == "all" or (isinstance(n, int) and n >= 0))
_SAME = re.compile(r"(<[^<>\s]+>)\1{3,}")
_SHOWN_CHARS = 400
_WIDTH = 76

log = logging.getLogger(__name__)


@dataclass
class Samples(RunListener, Group):
    """Writes `samples/iter_000.jsonl`, ... and, for evaluations, `samples/eval_init.jsonl`,
    `samples/eval_iter_009.jsonl`, ...
    """

    key: ClassVar[str] = "samples"

    output_dir: Path
    per_iteration: Annotated[int | str, _NUMBER]
    on_console: Annotated[int, at_least(0)]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._decode: Decode | None = None

    def loaded(self, decode: Decode) -> None:
        self._decode = decode

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        # The file of this iteration or evaluation.
        if self.per_iteration != 0:
            path = self.output_dir / "samples" / f"{'eval_' if name == 'eval' else ''}{suffix_of(iteration)}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            count = None if self.per_iteration == "all" else int(self.per_iteration)
            records = [each | {"iteration": iteration} for each in chosen(groups, advantages, count, self._decode)]
            lines = (json.dumps(each, ensure_ascii=False, default=str) + "\n" for each in records)
            write_whole(path, utf8("".join(lines)))
        # The same of an evaluation, for whoever watches.
        if name == "eval" and self.on_console:
            console, shown = output_console(), chosen(groups, advantages, self.on_console, self._decode)
            when = "before training" if iteration == -1 else f"after iteration {iteration + 1}"
            for number, sample in enumerate(shown, 1):
                console.print(f"sample {number}/{len(shown)} {when}", highlight=False)
                print_sample(console, sample)


def chosen(
    groups: Sequence[RolloutGroup], advantages: Advantages | None, count: int | None, decode: Decode | None = None
) -> list[dict[str, Any]]:
    """The best and the worst completion of the first problems, differing rewards first; all if `count` is None."""
    scores = [[rollout.score for rollout in group.rollouts] for group in groups]
    rewards = [[score.reward if score.is_scored else -inf for score in row] for row in scores]
    picks = [(i, j) for i, row in enumerate(rewards) for j in range(len(row))]
    # Of each group both ends: a group without signal is looked at last.
    if count is not None:
        order = sorted(range(len(groups)), key=lambda i: max(rewards[i]) == min(rewards[i]))
        ends = [(i, rewards[i].index(end(rewards[i]))) for i in order for end in (max, min)]
        picks = list(dict.fromkeys(ends))[:count]
    return [
        record(groups[i], groups[i].rollouts[j], advantages[i][j] if advantages else None, decode) for i, j in picks
    ]


def record(
    group: RolloutGroup, rollout: Rollout, advantage: float | None, decode: Decode | None = None
) -> dict[str, Any]:
    """A completion as a line of JSON. What is unknown is null: without a problem or a reward, or the advantage in
    evaluations.
    """
    problem, score = group.problem, rollout.score
    return {
        "problem_id": None if problem is None else problem.problem_id,
        "rendered": rendered(rollout, () if problem is None else problem.messages, decode),
        "prompt": None if problem is None else [dict(message) for message in problem.messages],
        "answer": None if problem is None else problem.answer,
        "completion": rollout.text,
        "reward": significant(score.reward, 6) if score.is_scored else None,
        "parts": {name: significant(value, 6) for name, value in score.parts.items()},
        "measured": {name: significant(value, 6) for name, value in score.measured.items()},
        "failure": score.failure,
        "advantage": None if advantage is None else significant(advantage, 6),
        "is_correct": score.is_correct,
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
        "version": next(compress(rollout.versions, rollout.is_sampled), -1),
        "images": list(dict.fromkeys(picture.key for own in rollout.pictures for picture in own)),
    }


def rendered(rollout: Rollout, messages: Sequence[Message], decode: Decode | None) -> list[tuple[str, str]]:
    """What the model saw, as pairs of who and text: the prompt, the policy's turns, and between them the roles of the
    messages that were inserted. Where there are several sequences, each has its number in place of "prompt", and in its
    prompt also turns that are trained in an earlier one.

    Args:
        messages: of the problem.
        decode: None: the messages stand for the prompt, and what was judged for all that comes after it.
    """
    # The last of the assistant's messages are the policy's: earlier ones were in the prompt.
    assistants = [i for i, message in enumerate(rollout.conversation) if message["role"] == "assistant"]
    said = assistants[-len(rollout.turns) :]
    if decode is None:
        before = rollout.conversation[: said[0]] if said else messages
        return [*((each["role"], str(each.get("content"))) for each in before), (POLICY, rollout.text)]
    # Between two turns stands what the messages between them became.
    inserted = (rollout.conversation[here + 1 : there] for here, there in pairwise(said))
    others = (", ".join(dict.fromkeys(message["role"] for message in each)) for each in inserted)
    found, count = list[tuple[str, str]](), len(rollout.starts)
    for number, (first, last) in enumerate(rollout.bounds, 1):
        start = first
        for is_sampled, run in groupby(rollout.is_sampled[first:last]):
            end = start + len(list(run))
            text = text_from(decode, rollout.token_ids[first:end], start - first)
            if rollout.pictures:  # of whose many tokens one is shown, and their number
                text = _SAME.sub(lambda same: f"{same[1]} x {len(same[0]) // len(same[1])}", text)
            if is_sampled:
                who = POLICY
            elif start == first:
                who = "prompt" if count == 1 else f"sequence {number} of {count}"
            else:  # whose messages are known of the last sequence alone
                who = next(others, "inserted") if count == 1 else "inserted"
            found.append((who, text))
            start = end
    return found


def text_from(decode: Decode, token_ids: Sequence[int], start: int) -> str:
    """The text of the tokens from `start` on. The one before them is decoded too, because some decoders drop a blank at
    the start of a text.
    """
    before = token_ids[:start][-1:]
    return decode([*before, *token_ids[start:]]).removeprefix(decode(before))


def print_sample(console: Console, sample: Mapping[str, Any], *, full: bool = False, has_prompt: bool = True) -> None:
    """What a record's model read, with the answer; facts about what it wrote; then that, green for advantages above 0
    and red below, the stronger the further away, and what others wrote in between.
    """
    reward, advantage, parts = sample["reward"], sample["advantage"] or 0.0, sample["parts"]
    facts = ["no reward" if reward is None else f"reward {reward:.4g}"]
    facts += [f"{visible(name)} {value:.4g}" for name, value in parts.items() if len(parts) > 1]
    facts += [f"{visible(name)} {value:.4g}" for name, value in sample["measured"].items() if value]
    facts += [] if sample["advantage"] is None else [f"advantage {advantage:+.2f}"]
    facts += [f"{sample['num_tokens']} tokens", sample["finish_reason"] or "end unknown"]
    facts += [f"version {sample['version']}"]
    facts += [] if sample["failure"] is None else [f"not scored: {sample['failure']}"]
    strong = round(105 + 150 * min(abs(advantage), 2.0) / 2.0)
    colour = "" if advantage == 0 else f"rgb(90,{strong},90)" if advantage > 0 else f"rgb({strong},90,90)"
    # The facts stand where the policy begins to write.
    whose = [who for who, _ in sample["rendered"]]
    start = [*whose, POLICY].index(POLICY)
    texts = [
        (who, Text(visible(text, full=full), colour if who == POLICY else "dim" if place > start else ""))
        for place, (who, text) in enumerate(sample["rendered"])
    ]
    answer = [("answer", Text(visible(sample["answer"], full=full)))] if sample["answer"] else []
    if sample["images"]:
        answer.insert(0, ("images", Text(", ".join(f"{name[:12]}..." for name in sample["images"]), "dim")))
    verdict = ("correct" if sample["is_correct"] else "wrong", Text("  ".join(facts), "bold"))
    print_rows(console, [*([*texts[:start], *answer] if has_prompt else []), verdict, *texts[start:]])


def print_rows(console: Console, rows: Iterable[tuple[str, Text]]) -> None:
    """Labels, and beside each its text."""
    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_column(style="dim", width=11)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(visible(label), text)
    console.print(grid)


def visible(text: str, *, full: bool = False) -> str:
    """A text for one cell of a terminal: its beginning and end, or all of it, with escapes for what does not print."""
    middle = _SHOWN_CHARS // 2
    short = text if full or len(text) <= _SHOWN_CHARS else f"{text[:middle]} ... {text[-middle:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


class FirstLook(RunListener):
    """Shows the first prompt and completion, in which most mistakes in templates, special tokens and ends show.

    Args:
        end_ids: tokens that end a completion: no reward needs to see them.
        shows: whether prompt and completion are shown too, and not hidden tokens alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], *, shows: bool = True) -> None:
        self._decode: Callable[..., str] = tokenizer.decode  # type: ignore[assignment]  # text of a sequence
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {*added, *tokenizer.all_special_ids} - {*end_ids}
        self._has_shown, self._has_warned = not shows, False

    def rollouts(self, name: str, groups: Sequence[RolloutGroup], *, advantages: object, iteration: int) -> None:
        # The first of all, as the model reads and writes it; a single turn stands alone.
        if groups and not self._has_shown:
            self._has_shown, rollout = True, groups[0].rollouts[0]
            (_, prompt), *turns = rendered(rollout, (), partial(self._decode, skip_special_tokens=False))
            length = [*rollout.is_sampled, True].index(True)
            log.info("the first prompt, as the model reads it (%d tokens):\n%s", length, _folded(prompt))
            texts = [_folded(text if len(turns) == 1 else f"[{who}] {text}") for who, text in turns]
            about = f"{rollout.num_sampled} tokens, reward {rollout.score.reward:.3g}"
            log.info("and its first completion, as the model wrote it (%s):\n%s", about, "\n".join(texts))
        # Special tokens that were sampled and are not in the text that was judged. Of groups without a problem, others
        # have made the rewards; an environment sees more than a text.
        if self._has_warned:
            return
        hidden: set[str] = set()
        for group in groups:
            for rollout in group.rollouts if group.problem is not None and group.problem.rules is None else ():
                sampled = self._special.intersection(compress(rollout.token_ids, rollout.is_sampled))
                hidden |= {text for text in map(self._decode, sampled) if text not in rollout.text}
        if hidden:
            self._has_warned = True
            names = ", ".join(sorted(map(repr, hidden)))
            log.warning("special tokens hidden from rewards (generation.skip_special_tokens): %s", names)


def _folded(text: str) -> str:
    return indent("\n".join(wrap(visible(text), _WIDTH, drop_whitespace=False)), "  ")
