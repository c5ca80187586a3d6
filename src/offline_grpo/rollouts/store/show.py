"""Recorded rollouts for a terminal: the best and the worst completion of each group, coloured by advantage; and in
numbers, by iteration, by length and by how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from offline_grpo.generation.dialogue import spoken
from offline_grpo.logger import print_table
from offline_grpo.logger.samples import visible
from offline_grpo.rollouts.store.rows import group_rows, plain_rows

_ROWS, _BINS = 20, 5
"""Of the tables by iteration and by length."""


def show_groups(console: Console, table: pa.Table, count: int, *, full: bool) -> None:
    """Print the first `count` groups, those with differing rewards first; `full`: whole and all completions."""
    rewards = table["reward"].to_pylist()
    newest = max(table["iteration"].to_pylist())  # a folder of `datasets` has all
    groups = [(key, rows) for key, rows in group_rows(table).items() if key[0] == newest]
    groups.sort(key=lambda group: len({rewards[row] for row in group[1]}) == 1)
    for (iteration, phase, number), rows in groups[:count]:
        members = sorted(plain_rows(table.take(rows)), key=lambda row: inf if row["reward"] is None else -row["reward"])
        first = members[0]
        name = "" if first["problem_id"] is None else f", problem {visible(first['problem_id'])}"
        when = "before training" if iteration == -1 else f"iteration {iteration + 1}"
        title = f"{phase}, {when}, group {number + 1}{name}: {len(members)} completions"
        console.rule(Text(title), align="left", style="dim")
        shown = members if full or len(members) == 1 else [members[0], members[-1]]
        console.print(Group(*_prompt(first, full=full), *(_answer(row, full=full) for row in shown)))


def _prompt(row: Mapping[str, Any], *, full: bool) -> Iterator[Table]:
    for message in row["messages"] or ():
        yield _line(message["role"], Text(_printable(message["content"], full=full)))
    if row["answer"]:
        yield _line("answer", Text(_printable(row["answer"], full=full)))


def _answer(row: Mapping[str, Any], *, full: bool) -> Table:
    """Reward, advantage and why it ended; then the completion."""
    facts = ["no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"]
    parts = row["parts"] or {}
    facts += [f"{visible(name)} {value:.3g}" for name, value in parts.items() if len(parts) > 1]
    facts += [] if row["advantage"] is None else [f"advantage {row['advantage']:+.2f}"]
    facts += [
        f"{len(row['completion_ids'])} tokens",
        row["finish_reason"] or "end unknown",
        f"version {row['version']}",
    ]
    facts += [] if row["failure"] is None else [f"not scored: {row['failure']}"]
    text, colour = Text.assemble(("  ".join(facts) + "\n", "bold")), _colour(row["advantage"] or 0.0)
    if row["conversation"] is None:
        text.append(_printable(row["text"], full=full), colour)
    else:
        said = next(i for i, message in enumerate(row["conversation"]) if message["role"] == "assistant")
        for line, is_sampled, is_thinking in spoken(row["conversation"][said:]):
            style = f"{colour} italic" if is_thinking else colour if is_sampled else "dim"
            text.append(_printable(line, full=full) + "\n", style.strip())
    return _line("correct" if row["is_correct"] else "wrong", text)


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


def _facts_of(tables: Iterable[pa.Table]) -> tuple[dict[str, np.ndarray], list[bool]]:
    """Of R completions, columns [R]; and whether the rewards of each group differ."""
    names = ("iteration", "reward", "is_correct", "finish_reason", "failure")
    columns: dict[str, list] = {name: [] for name in (*names, "length", "repeated")}
    has_signal = []
    for table in tables:
        rows = table.select([*names, "completion_ids"]).to_pydict()
        repeated = [False] * table.num_rows  # whether the same tokens came before in its group
        for members in group_rows(table).values():
            seen: set[tuple[int, ...]] = set()
            for row in members:
                tokens = tuple(rows["completion_ids"][row])
                repeated[row] = tokens in seen
                seen.add(tokens)
            has_signal.append(len({rows["reward"][row] for row in members} - {None}) > 1)
        found = rows | {"length": map(len, rows["completion_ids"]), "repeated": repeated}
        for name, column in columns.items():
            column.extend(found[name])
    of = {name: np.array(column) for name, column in columns.items()}
    return of | {"reward": of["reward"].astype(float)}, has_signal  # None: NaN


def print_stats(console: Console, tables: Iterable[pa.Table]) -> None:
    """Totals, and tables by length and by iteration, of tables that have all columns and whole groups."""
    of, has_signal = _facts_of(tables)
    count = len(of["reward"])
    reasons = Counter(reason or "unknown" for reason in of["finish_reason"])
    failures = Counter(failure.partition(":")[0] for failure in of["failure"] if failure is not None)
    equal = 1 - np.mean(has_signal)
    correlation = "one of them does not vary"
    pair = np.stack([of["length"], of["reward"]])[:, ~np.isnan(of["reward"])]
    if pair.size and pair.std(axis=1).all():
        correlation = f"correlation {np.corrcoef(pair)[0, 1]:+.2f}"
    lines = [
        f"{count:,} completions in {len(has_signal):,} groups, {of['length'].sum():,} tokens",
        f"ended: {', '.join(f'{reason} {n / count:.1%}' for reason, n in reasons.most_common())}",
        f"repeated within their group: {of['repeated'].mean():.1%}; groups whose rewards are all equal: {equal:.1%}",
        f"reward against length: {correlation}",
    ]
    if failures:
        causes = ", ".join(f"{n:,} {cause}" for cause, n in failures.most_common())
        lines.append(f"not scored: {causes}")
    console.print("\n".join(lines), markup=False, highlight=False)
    for label, parts in (("length", _length_bins(of["length"])), ("iteration", _iteration_blocks(of["iteration"]))):
        print_table(console, _stats_table(label, parts, of))


def _length_bins(lengths: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Fifths of the completions, from short to long."""
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _BINS + 1)[1:]).astype(int))
    pairs = zip([int(lengths.min()), *(edges[:-1] + 1)], edges, strict=True)
    return [(f"{low} to {high}", (lengths >= low) & (lengths <= high)) for low, high in pairs]


def _iteration_blocks(iterations: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Each iteration, or, of many, blocks of them."""
    found = np.unique(iterations)
    blocks = np.array_split(found, min(_ROWS, len(found)))
    names = [str(b[0] + 1) if len(b) == 1 else f"{b[0] + 1} to {b[-1] + 1}" for b in blocks]
    return [(name, np.isin(iterations, block)) for name, block in zip(names, blocks, strict=True)]


def _stats_table(label: str, parts: Sequence[tuple[str, np.ndarray]], of: dict[str, np.ndarray]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (label, "completions", "reward", "correct", "tokens", "cut off", "repeated"):
        table.add_column(name, justify="left" if name == label else "right")
    for name, mask in parts:
        if mask.any():
            known = of["reward"][mask & ~np.isnan(of["reward"])]
            shown = (of["is_correct"], of["length"], of["finish_reason"] == "length", of["repeated"])
            correct, length, cut, repeated = (values[mask].mean() for values in shown)
            shares = (
                f"{known.mean():.3f}" if len(known) else "-",
                f"{correct:.1%}",
                f"{length:.1f}",
                f"{cut:.1%}",
                f"{repeated:.1%}",
            )
            table.add_row(name, f"{mask.sum():,}", *shares)
    return table
