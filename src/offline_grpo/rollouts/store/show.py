"""Recorded rollouts for a terminal: the best and the worst completion of each group, coloured by advantage; and in
numbers, by iteration, by length and by how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

import numpy as np
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo.logger import print_table
from offline_grpo.logger.samples import Decode, print_sample, record, visible
from offline_grpo.rollouts.store.rows import group_rows, groups_of

_ROWS, _BINS = 20, 5
"""Of the tables by iteration and by length."""


def show_groups(console: Console, table: pa.Table, count: int, *, full: bool, decode: Decode | None = None) -> None:
    """Print the first `count` groups, those with differing rewards first; `full`: whole and all completions."""
    rewards, advantages = (table[name].to_pylist() for name in ("reward", "advantage"))
    newest = max(table["iteration"].to_pylist())  # a folder of `datasets` has all
    found = [(key, rows) for key, rows in group_rows(table).items() if key[0] == newest]
    found.sort(key=lambda group: len({rewards[row] for row in group[1]}) == 1)
    for (iteration, phase, number), rows in found[:count]:
        # best first; those without a reward last
        order = sorted(rows, key=lambda row: inf if rewards[row] is None else -rewards[row])
        [group] = groups_of(table, [order])
        pairs = zip(group.rollouts, order, strict=True)
        samples = [record(group, rollout, advantages[row], decode) for rollout, row in pairs]
        name = "" if group.problem is None else f", problem {visible(group.problem.problem_id)}"
        when = "before training" if iteration == -1 else f"iteration {iteration + 1}"
        title = f"{phase}, {when}, group {number + 1}{name}: {len(samples)} completions"
        console.rule(Text(title), align="left", style="dim")
        shown = samples if full or len(samples) == 1 else [samples[0], samples[-1]]
        for place, sample in enumerate(shown):  # a prompt that all share is shown once
            is_other = sample["rendered"][0] != shown[0]["rendered"][0]
            print_sample(console, sample, full=full, has_prompt=place == 0 or is_other)


def print_stats(console: Console, tables: Iterable[pa.Table]) -> None:
    """Totals, and tables by length and by iteration, of tables that have all columns and whole groups."""
    # Columns [R] of all completions; whether the same tokens came before in a group, and whether its rewards differ.
    names = ("iteration", "reward", "is_correct", "finish_reason", "failure")
    columns: dict[str, list] = {name: [] for name in (*names, "length", "repeated")}
    has_signal = []
    for table in tables:
        rows = table.select([*names, "completion_ids", "is_sampled"]).to_pydict()
        repeated = [False] * table.num_rows
        for members in group_rows(table).values():
            seen: set[tuple[int, ...]] = set()
            for row in members:
                tokens = tuple(rows["completion_ids"][row])
                repeated[row] = tokens in seen
                seen.add(tokens)
            has_signal.append(len({rows["reward"][row] for row in members} - {None}) > 1)
        pairs = zip(rows["completion_ids"], rows["is_sampled"], strict=True)
        lengths = [len(tokens) if mask is None else sum(mask) for tokens, mask in pairs]  # of what was sampled
        found = rows | {"length": lengths, "repeated": repeated}
        for name, column in columns.items():
            column.extend(found[name])
    of = {name: np.array(column) for name, column in columns.items()}
    of["reward"] = of["reward"].astype(float)  # None: NaN
    # Totals.
    count, lengths = len(of["reward"]), of["length"]
    reasons = Counter(reason or "unknown" for reason in of["finish_reason"])
    failures = Counter(failure.partition(":")[0] for failure in of["failure"] if failure is not None)
    correlation = "one of them does not vary"
    pair = np.stack([lengths, of["reward"]])[:, ~np.isnan(of["reward"])]
    if pair.size and pair.std(axis=1).all():
        correlation = f"correlation {np.corrcoef(pair)[0, 1]:+.2f}"
    repeated, equal = of["repeated"].mean(), 1 - np.mean(has_signal)
    lines = [
        f"{count:,} completions in {len(has_signal):,} groups, {lengths.sum():,} tokens",
        f"ended: {', '.join(f'{reason} {n / count:.1%}' for reason, n in reasons.most_common())}",
        f"repeated within their group: {repeated:.1%}; groups whose rewards are all equal: {equal:.1%}",
        f"reward against length: {correlation}",
    ]
    if failures:
        lines.append(f"not scored: {', '.join(f'{n:,} {cause}' for cause, n in failures.most_common())}")
    console.print("\n".join(lines), markup=False, highlight=False)
    # Fifths of the completions, from short to long.
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _BINS + 1)[1:]).astype(int))
    pairs = zip([int(lengths.min()), *(edges[:-1] + 1)], edges, strict=True)
    bins = [(f"{low} to {high}", (lengths >= low) & (lengths <= high)) for low, high in pairs]
    print_table(console, _stats_table("length", bins, of))
    # Each iteration, or, of many, blocks of them.
    numbers = np.unique(of["iteration"])
    blocks = np.array_split(numbers, min(_ROWS, len(numbers)))
    texts = [str(b[0] + 1) if len(b) == 1 else f"{b[0] + 1} to {b[-1] + 1}" for b in blocks]
    masks = [np.isin(of["iteration"], block) for block in blocks]
    print_table(console, _stats_table("iteration", zip(texts, masks, strict=True), of))


def _stats_table(label: str, parts: Iterable[tuple[str, np.ndarray]], of: dict[str, np.ndarray]) -> Table:
    """Means over each part of the completions: its name, and a mask [R]."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (label, "completions", "reward", "correct", "tokens", "cut off", "repeated"):
        table.add_column(name, justify="left" if name == label else "right")
    for name, mask in parts:
        if mask.any():
            known = of["reward"][mask & ~np.isnan(of["reward"])]
            shown = (of["is_correct"], of["length"], of["finish_reason"] == "length", of["repeated"])
            correct, length, cut, repeated = (values[mask].mean() for values in shown)
            reward = f"{known.mean():.3f}" if len(known) else "-"
            shares = (f"{correct:.1%}", f"{length:.1f}", f"{cut:.1%}", f"{repeated:.1%}")
            table.add_row(name, f"{mask.sum():,}", reward, *shares)
    return table
