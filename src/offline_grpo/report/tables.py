"""Tables of text, for a terminal and in Markdown: of a run, a sweep and a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import rich.table
from rich.console import Console
from rich.text import Text

from offline_grpo.logger import print_table


@dataclass(frozen=True)
class Table:
    """Cells of text; every row has one for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self, console: Console, *, num_folding: int = 1) -> None:
        """Aligned columns without those that are empty; cells of the first `num_folding` fold where they must."""
        shown = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        table = rich.table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
        for i in shown:
            table.add_column(Text(self.columns[i]), overflow="fold", no_wrap=i >= num_folding)
        for row in self.rows:
            table.add_row(*(Text(row[i]) for i in shown))
        print_table(console, table)

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def say(console: Console, lines: Iterable[object]) -> None:
    """Print lines as they are; the terminal folds what is too wide, so that a path stays in one piece."""
    for line in lines:
        console.print(str(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


def number(value: float | None, form: str = ".3f", *, empty: str = "") -> str:
    """A cell."""
    return empty if value is None else format(value, form)


def with_interval(value: float | None, interval: tuple[float | None, float | None] | None) -> str:
    """`0.917 [0.895, 0.938]`."""
    low, high = interval or (None, None)
    return number(value) + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")
