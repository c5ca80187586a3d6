"""Recorded rollouts as a person reads them: the best and the worst completion of each group, coloured by advantage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from huggingface_hub import try_to_load_from_cache
from pydantic_core import from_json
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from offline_grpo.logger.samples import visible
from offline_grpo.rollouts.store.reader import Shard
from offline_grpo.rollouts.store.rows import group_rows

_SHOWN = 200
"""Tokens of a completion."""


def show_groups(console: Console, shard: Shard, table: pa.Table, count: int, *, full: bool) -> None:
    """Print the first `count` groups of a checked table, those with differing rewards first.

    Args:
        full: whole completions, and all of each group.
    """
    tokenizer = None if shard.origin is None else tokenizer_of(shard.origin.model)
    rewards = table["reward"].to_pylist()
    newest = max(table["iteration"].to_pylist())  # a folder of `datasets` has all
    groups = [(key, rows) for key, rows in group_rows(table).items() if key[0] == newest]
    groups.sort(key=lambda group: len({rewards[row] for row in group[1]}) == 1)
    for (iteration, phase, number), rows in groups[:count]:
        members = sorted(table.take(rows).to_pylist(), key=lambda row: -row["reward"])
        first = members[0]
        name = "" if first["problem_id"] is None else f", problem {visible(first['problem_id'])}"
        when = "before training" if iteration == -1 else f"iteration {iteration + 1}"
        console.rule(
            Text(f"{phase}, {when}, group {number + 1}{name}: {len(members)} completions"), align="left", style="dim"
        )
        console.print(
            Group(
                *_prompt(first, full=full),
                *(_answer(member, tokenizer, full=full) for member in (members if full else _ends(members))),
            )
        )


def _ends(members: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [members[0], members[-1]] if len(members) > 1 else list(members)


def _prompt(row: Mapping[str, Any], *, full: bool) -> Iterator[Table]:
    for message in from_json(row["messages"]) if row["messages"] is not None else ():
        yield _line(message["role"], Text(_printable(message["content"], full=full)))
    if row["answer"]:
        yield _line("answer", Text(_printable(row["answer"], full=full)))


def _answer(row: Mapping[str, Any], tokenizer: Tokenizer | None, *, full: bool) -> Table:
    """Reward, advantage and why it ended; below it the completion, token by token where the tokenizer is on this
    machine.
    """
    parts = {} if row["parts"] is None else from_json(row["parts"])
    facts = [
        f"reward {row['reward']:.3f}",
        *(f"{visible(name)} {value:.3g}" for name, value in parts.items() if len(parts) > 1),
    ]
    facts += [] if row["advantage"] is None else [f"advantage {row['advantage']:+.2f}"]
    facts += [
        f"{len(row['completion_ids'])} tokens",
        row["finish_reason"] or "end unknown",
        f"version {row['version']}",
    ]
    facts += [] if row["failure"] is None else [f"not scored: {row['failure']}"]
    text = Text.assemble(("  ".join(facts) + "\n", "bold"))
    if tokenizer is None:
        text.append(_printable(row["text"], full=full), _colour(row["advantage"] or 0.0))
        return _line("correct" if row["is_correct"] else "wrong", text)
    advantages = row["advantages"] or [row["advantage"] or 0.0] * len(row["completion_ids"])
    sampled = row["is_sampled"] or [True] * len(advantages)
    tokens = list(zip(pieces(tokenizer, row["completion_ids"]), advantages, sampled, strict=True))
    for place, (piece, advantage, is_sampled) in enumerate(tokens):
        if not full and len(tokens) > _SHOWN and not (place < _SHOWN // 2 or place >= len(tokens) - _SHOWN // 2):
            text.append(" ... " if place == _SHOWN // 2 else "")
            continue
        text.append(_printable(piece, full=full), _colour(advantage) if is_sampled else "dim italic")
    return _line("correct" if row["is_correct"] else "wrong", text)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """The text of each token; a character that several tokens make up comes with the last of them, and the others are
    empty.
    """
    before, start = (
        0,
        0,
    )  # the tokens in between are told, and decoded again: what a token reads as depends on the one before
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[before:end], skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            yield ""
            continue
        yield text[len(tokenizer.decode(ids[before:start], skip_special_tokens=False)) :]
        before, start = start, end


def _printable(text: str, *, full: bool) -> str:
    return "".join(map(visible, text)) if full else visible(text)  # of a single letter `visible` leaves nothing out


def _colour(advantage: float) -> str:
    """Green above 0, red below, the stronger the further away; the default colour at 0."""
    strength = round(105 + 150 * min(abs(advantage), 2.0) / 2.0)
    return "" if advantage == 0 else f"rgb(90,{strength},90)" if advantage > 0 else f"rgb({strength},90,90)"


def _line(label: str, text: Text) -> Table:
    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_column(style="dim", no_wrap=True, width=9)
    grid.add_column(overflow="fold")
    grid.add_row(visible(label), text)
    return grid


@cache
def tokenizer_of(model: str) -> Tokenizer | None:
    """The model's tokenizer, if this machine has it; nothing is downloaded."""
    found: object = Path(model) / "tokenizer.json"
    if not Path(model).is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        found = try_to_load_from_cache(model, "tokenizer.json")
    return Tokenizer.from_file(str(found)) if isinstance(found, (str, Path)) and Path(found).is_file() else None
