"""Progress display: a live panel on a terminal, one line per record otherwise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from offline_grpo import progress
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import output_console
from offline_grpo.logger.atropos_names import check_choice, console_lines
from offline_grpo.logger.lines import GAP, clock, eval_cells, folded, train_cells, train_line
from offline_grpo.types import Metrics

FINAL_PHASES = ("done", "stopped")
ITERATIONS_IN_ESTIMATE = 10  # the remaining time is estimated from the last 10 iterations
CELL_WIDTH = 13


@dataclass
class ConsoleLogger(RunListener):
    """Shows iteration, phase and how far it is, metrics, last evaluation and remaining time: live on a terminal,
    otherwise a line a record.

    Args:
        refresh_per_s: refresh rate of the live display, in Hz.
        names: "atropos" prints, also above the live display, what Atropos' trainer prints after a step.
    """

    refresh_per_s: float
    names: str
    console: Console = field(default_factory=output_console, init=False, repr=False)
    _live: Live | None = field(default=None, init=False, repr=False)
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots"), init=False, repr=False)
    _num_iterations: int = field(default=0, init=False, repr=False)  # 0 before `start`
    _num_done: int = field(default=0, init=False, repr=False)
    _began_s: float = field(default=0.0, init=False, repr=False)
    _phase: str = field(default="", init=False, repr=False)
    _phase_began_s: float = field(default=0.0, init=False, repr=False)
    _progress: Mapping[str, tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False
    )  # unit -> done, total
    _train: Metrics = field(default_factory=dict, init=False, repr=False)
    _eval: tuple[int, Metrics] | None = field(default=None, init=False, repr=False)
    _last_mark_s: float = field(default=0.0, init=False, repr=False)
    _iteration_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=ITERATIONS_IN_ESTIMATE), init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_choice("logger.console.names", self.names)
        if self.refresh_per_s <= 0:
            raise ConfigError(f"logger.console.refresh_per_s={self.refresh_per_s}: must be above 0, for example 4")

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        self._num_iterations = num_iterations
        self._last_mark_s = time.monotonic()
        self._go_live()
        if self._live is not None:
            self._live.transient = False

    def phase(self, name: str, iteration: int) -> None:
        """Show the current phase ("load model", "generate", ...), on the live display only."""
        self._progress = {}
        self._phase, self._phase_began_s = name, time.monotonic()
        self._began_s = self._phase_began_s - progress.elapsed_s()
        self._num_done = max(iteration, 0)
        self._go_live()

    def progress(self, done: int, total: int, unit: str) -> None:
        """Show how far the phase is, on the live display only."""
        self._progress = {**self._progress, unit: (done, total)}  # a new one: another thread may be drawing the old one

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self._num_done = iteration + 1
        if name == "eval":
            self._eval = (iteration, metrics)
        else:
            self._train = metrics
        self._mark_time(name, iteration)
        at = f"{self._num_done:>{len(str(self._num_iterations))}}/{self._num_iterations}"
        if self._live is None:
            width = self.console.width
            if name == "eval":
                lines = folded(f"{at}{GAP}eval", eval_cells(metrics), width=width)
            else:
                lines = [train_line(at, metrics, f"{self._time_left()} left", width=width)]
            self._print(lines)
        if self.names == "atropos" and name == "train":
            self._print(console_lines(at.lstrip(), metrics))

    def _print(self, lines: Sequence[str]) -> None:
        self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the last state and restore the terminal and its cursor. Safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            is_early = "stopped_early" in {**self._train, **(self._eval[1] if self._eval is not None else {})}
            is_done = self._num_done >= self._num_iterations or is_early
            self._phase = FINAL_PHASES[0] if is_done else FINAL_PHASES[1]
            self._progress = {}
            live.stop()

    def _go_live(self) -> None:
        """Begin to draw, on a terminal. What is drawn before `start` vanishes at the end: a run that is refused leaves
        its error alone.
        """
        if self._live is None and self.console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                refresh_per_second=self.refresh_per_s,
                transient=not self._num_iterations,
            )
            self._live.start()

    def _mark_time(self, name: str, iteration: int) -> None:
        """Record the duration of an iteration, including its evaluation; the evaluation before training belongs to no
        iteration.
        """
        now_s = time.monotonic()
        if name == "train":
            self._iteration_s.append(now_s - self._last_mark_s)
        if name == "train" or iteration == -1:
            self._last_mark_s = now_s

    def _time_left(self) -> str:
        if not self._iteration_s:
            return "-"
        mean_s = sum(self._iteration_s) / len(self._iteration_s)
        return clock(mean_s * max(self._num_iterations - self._num_done, 0))

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = [self._iteration_row()] if self._num_iterations else []
        rows.append(self._phase_row())
        if self._train:
            rows.append(metric_rows(train_cells(self._train), width=self.console.width))
        if self._eval is not None:
            iteration, metrics = self._eval
            when = "eval before training" if iteration == -1 else f"eval after {iteration + 1}"
            rows += [Text(line) for line in folded(when, eval_cells(metrics), width=self.console.width)]
        return Group(*rows)

    def _iteration_row(self) -> Table:
        done, total = self._num_done, self._num_iterations
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        times = Text(f"{clock(time.monotonic() - self._began_s)} elapsed, {self._time_left()} left", "dim")
        row.add_row(Text(f"iteration {done}/{total}"), ProgressBar(total=total, completed=done), times)
        return row

    def _phase_row(self) -> RenderableType:
        if self._phase in FINAL_PHASES:
            return Text(self._phase, "bold")
        shown = [
            (unit, done, total) for unit, (done, total) in self._progress.items() if done < total > 1 or total == 0
        ]
        parts = [f"{done:,}/{total:,} {unit}" if total else f"{done:,} {unit}" for unit, done, total in shown]
        took = clock(time.monotonic() - self._phase_began_s)
        self._spinner.update(text=Text.assemble((self._phase, "bold"), GAP, GAP.join([*parts, ""]), (took, "dim")))
        return self._spinner


def metric_rows(cells: list[tuple[str, str]], *, width: int) -> Group:
    """Labels above values, in columns of constant position, as many beside each other as `width` has room for."""
    per_row = max(1, width // CELL_WIDTH)
    grids: list[RenderableType] = []
    for first in range(0, len(cells), per_row):
        chosen = cells[first : first + per_row]
        grid = Table.grid()
        for _ in chosen:
            grid.add_column(width=CELL_WIDTH, no_wrap=True)
        grid.add_row(*(Text(label, "dim") for label, _ in chosen))
        grid.add_row(*(Text(value, "bold") for _, value in chosen))
        grids.append(grid)
    return Group(*grids)
