"""Recorded rollouts in numbers: by iteration, by length, by how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

from offline_grpo.logger import print_table
from offline_grpo.rollouts.store.rows import group_rows

LEAST_WIDTH = 80
_ROWS, _BINS = 20, 5


@dataclass(frozen=True)
class Facts:
    """Of R completions, in the order of the record: `columns` [R] each, and whether the rewards of each group
    differ.
    """

    columns: dict[str, np.ndarray]
    has_signal: list[bool]


def facts_of(tables: Iterable[pa.Table]) -> Facts:
    """From tables with all columns, each with whole groups."""
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
            has_signal.append(len({rows["reward"][row] for row in members}) > 1)
        found = rows | {"length": map(len, rows["completion_ids"]), "repeated": repeated}
        for name, column in columns.items():
            column.extend(found[name])
    return Facts({name: np.array(column) for name, column in columns.items()}, has_signal)


def print_stats(console: Console, facts: Facts) -> None:
    """Totals, a table of iterations, and reward against length."""
    of, count = facts.columns, len(facts.columns["reward"])
    reasons = Counter(reason or "unknown" for reason in of["finish_reason"])
    failures = Counter(failure for failure in of["failure"] if failure is not None)
    varies = count > 1 and of["length"].std() > 0 and of["reward"].std() > 0
    lines = [
        f"{count:,} completions in {len(facts.has_signal):,} groups, {of['length'].sum():,} tokens",
        f"ended: {', '.join(f'{reason} {n / count:.1%}' for reason, n in reasons.most_common())}",
        f"repeated within their group: {of['repeated'].mean():.1%}; groups whose rewards are all equal: "
        f"{1 - np.mean(facts.has_signal):.1%}",
        f"reward against length: correlation {np.corrcoef(of['length'], of['reward'])[0, 1]:+.2f}"
        if varies
        else "reward against length: one of them does not vary",
    ]
    if failures:
        causes = ", ".join(f"{n:,} {cause}" for cause, n in failures.most_common())
        lines.append(f"not scored, and got 0 or, if lower, their group's least: {causes}")
    console.print("\n".join(lines), markup=False, highlight=False)
    for label, parts in (("length", _length_bins(of["length"])), ("iteration", _iteration_blocks(of["iteration"]))):
        print_table(console, _table(label, parts, of), least_width=LEAST_WIDTH)


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


def _table(label: str, parts: Sequence[tuple[str, np.ndarray]], of: dict[str, np.ndarray]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (label, "completions", "reward", "correct", "tokens", "cut off", "repeated"):
        table.add_column(name, justify="left" if name == label else "right")
    for name, mask in parts:
        if mask.any():
            reward, correct, length, cut, repeated = (
                values[mask].mean()
                for values in (
                    of["reward"],
                    of["is_correct"],
                    of["length"],
                    of["finish_reason"] == "length",
                    of["repeated"],
                )
            )
            shares = (f"{reward:.3f}", f"{correct:.1%}", f"{length:.1f}", f"{cut:.1%}", f"{repeated:.1%}")
            table.add_row(name, f"{mask.sum():,}", *shares)
    return table
