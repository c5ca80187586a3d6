"""Tables of text, for a terminal and in Markdown: of a run, a sweep and a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

from rich.console import Console

GAP = "  "
LEAST_WIDTH = 12  # of a column whose cells fold


@dataclass(frozen=True)
class Table:
    """Cells of text; every row has one for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self, width: int, *, num_folding: int = 1) -> list[str]:
        """Aligned columns. Where they have no room, cells of the first `num_folding` columns fold, the widest first."""
        table = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        while sum(widths) + len(GAP) * (len(widths) - 1) > width and max(widths[:num_folding]) > LEAST_WIDTH:
            widths[widths.index(max(widths[:num_folding]))] -= 1
        lines = []
        for row in table:
            cells = [wrap(cell, max(each, 1), break_on_hyphens=False) for cell, each in zip(row, widths, strict=True)]
            for parts in zip_longest(*cells, fillvalue="") if any(cells) else [()]:
                padded = (part.ljust(each) for part, each in zip(parts, widths, strict=False))
                lines.append(GAP.join(padded).rstrip())
        return lines

    def without_empty(self) -> Table:
        """Without the columns in which nothing was measured."""
        kept = [i for i in range(len(self.columns)) if not self.rows or any(row[i] for row in self.rows)]
        return Table([self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows])

    def split(self, width: int) -> list[Table]:
        """Tables of the first column and as many of the others as `width` has room for."""
        widths = [max(map(len, column)) + len(GAP) for column in zip(self.columns, *self.rows, strict=True)]
        blocks: list[list[int]] = [[]]
        for i in range(1, len(widths)):
            if blocks[-1] and widths[0] + sum(widths[j] for j in [*blocks[-1], i]) > width + len(GAP):
                blocks.append([])
            blocks[-1].append(i)
        tables = ([0, *block] for block in blocks)
        return [Table([self.columns[i] for i in t], [[row[i] for i in t] for row in self.rows]) for t in tables]

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


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """`0.917 [0.895, 0.938]`."""
    return number(value) + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")
