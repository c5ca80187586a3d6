"""What recorded rollouts are like, in numbers: by iteration, by length, by how they ended."""

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

_FACTS = ("iteration", "reward", "is_correct", "finish_reason", "failure")
COLUMNS = (*_FACTS, "group", "completion_ids")
LEAST_WIDTH = 80
_ROWS, _BINS = 20, 5


@dataclass(frozen=True)
class Facts:
    """Of R completions, in the order of the record.

    Args:
        is_repeated: whether the same tokens came before in its group.
    """

    iterations: np.ndarray  # [R] int
    rewards: np.ndarray  # [R]
    lengths: np.ndarray  # [R] tokens of the completion
    is_correct: np.ndarray  # [R] bool
    is_repeated: np.ndarray  # [R] bool
    reasons: Sequence[str]  # [R]
    failures: Counter[str]  # why some could not be scored
    num_groups: int
    num_groups_without_signal: int


def facts_of(tables: Iterable[pa.Table]) -> Facts:
    """From tables with at least `COLUMNS`, each with whole groups."""
    columns: dict[str, list] = {name: [] for name in (*_FACTS, "length", "repeated")}
    num_groups = num_without = 0
    for table in tables:
        rows = table.select(COLUMNS).to_pydict()
        seen: set[tuple] = set()
        rewards: dict[tuple[int, int], set[float]] = {}
        for iteration, group, tokens, reward in zip(
            rows["iteration"], rows["group"], rows["completion_ids"], rows["reward"], strict=True
        ):
            rewards.setdefault((iteration, group), set()).add(reward)
            key = (iteration, group, *tokens)
            columns["repeated"].append(key in seen)
            columns["length"].append(len(tokens))
            seen.add(key)
        num_groups += len(rewards)
        num_without += sum(len(values) == 1 for values in rewards.values())
        for name in _FACTS:
            columns[name] += rows[name]
    return Facts(
        iterations=np.array(columns["iteration"]),
        rewards=np.array(columns["reward"]),
        lengths=np.array(columns["length"]),
        is_correct=np.array(columns["is_correct"]),
        is_repeated=np.array(columns["repeated"]),
        reasons=[reason or "unknown" for reason in columns["finish_reason"]],
        failures=Counter(failure for failure in columns["failure"] if failure is not None),
        num_groups=num_groups,
        num_groups_without_signal=num_without,
    )


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's, None where one of them does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 and x.std() > 0 and y.std() > 0 else None


def print_stats(console: Console, facts: Facts) -> None:
    """Totals, a table of iterations, and reward against length."""
    ended = ", ".join(
        f"{reason} {count / len(facts.reasons):.1%}" for reason, count in Counter(facts.reasons).most_common()
    )
    relation = correlation(facts.lengths, facts.rewards)
    failed = ", ".join(f"{count:,} {cause}" for cause, count in facts.failures.most_common())
    lines = [
        f"{len(facts.rewards):,} completions in {facts.num_groups:,} groups, {facts.lengths.sum():,} tokens",
        f"ended: {ended}",
        f"repeated within their group: {facts.is_repeated.mean():.1%}; groups whose rewards are all equal: "
        f"{facts.num_groups_without_signal / facts.num_groups:.1%}",
        f"reward against length: correlation {relation:+.2f}"
        if relation is not None
        else "reward against length: one of them does not vary",
        *([f"not scored, and got 0 or, if lower, their group's least: {failed}"] if failed else []),
    ]
    console.print("\n".join(lines), markup=False, highlight=False)
    for table in (_table("length", _length_bins(facts), facts), _table("iteration", _iteration_blocks(facts), facts)):
        print_table(console, table, least_width=LEAST_WIDTH)


def _length_bins(facts: Facts) -> list[tuple[str, np.ndarray]]:
    """Fifths of the completions, from short to long."""
    edges = np.unique(np.quantile(facts.lengths, np.linspace(0, 1, _BINS + 1)[1:]).astype(int))
    lows = [int(facts.lengths.min()), *(edges[:-1] + 1)]
    pairs = zip(lows, edges, strict=True)
    return [(f"{low} to {high}", (facts.lengths >= low) & (facts.lengths <= high)) for low, high in pairs]


def _iteration_blocks(facts: Facts) -> list[tuple[str, np.ndarray]]:
    """Each iteration, or, of many, blocks of them."""
    blocks = np.array_split(np.unique(facts.iterations), min(_ROWS, len(np.unique(facts.iterations))))
    return [
        (
            str(b[0] + 1) if len(b) == 1 else f"{b[0] + 1} to {b[-1] + 1}",
            (facts.iterations >= b[0]) & (facts.iterations <= b[-1]),
        )
        for b in blocks
    ]


def _table(label: str, parts: Sequence[tuple[str, np.ndarray]], facts: Facts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (label, "completions", "reward", "correct", "tokens", "cut off", "repeated"):
        table.add_column(name, justify="left" if name == label else "right")
    is_cut = np.array([reason == "length" for reason in facts.reasons])
    for name, mask in parts:
        if mask.any():
            shares = [f"{values[mask].mean():.1%}" for values in (is_cut, facts.is_repeated)]
            means = [
                f"{facts.rewards[mask].mean():.3f}",
                f"{facts.is_correct[mask].mean():.1%}",
                f"{facts.lengths[mask].mean():.1f}",
            ]
            table.add_row(name, f"{mask.sum():,}", *means, *shares)
    return table
