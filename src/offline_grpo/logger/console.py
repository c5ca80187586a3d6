"""Progress display: a live panel on a terminal, one line per record otherwise. The lines are in run.log, too."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from rich.columns import Columns
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from offline_grpo import progress
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import output_console
from offline_grpo.logger.atropos import Names, console_lines
from offline_grpo.settings import Group, above
from offline_grpo.types import Metrics

ITERATIONS_IN_ESTIMATE = 10  # the remaining time is estimated from the last 10 iterations
SILENCE_S = 25.0  # without a terminal, a line says how far a phase is after so long without one
CELL_WIDTH = 13
GAP = "  "
TRAIN_FIELDS = (
    # label, metric, format; a narrow line has the first of them only
    ("reward", "reward_mean", "{:.3f}"),
    ("success", "success_rate", "{:.3f}"),
    ("server", "sync/frozen", "frozen"),  # where it is
    ("KL", "kl_divergence", "{:.4f}"),
    ("gen tok/s", "perf/generate_tokens_per_s", "{:,.0f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
    ("train tok/s", "perf/train_tokens_per_s", "{:,.0f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("loss", "loss_total", "{:+.4f}"),
    ("clipped", "clip_frac", "{:.1%}"),
)

messages = logging.getLogger(__name__)


def save_and_end() -> None:
    """Whoever reads what a run prints has ended, such as `head`: the run saves its state and ends, as on SIGTERM."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    signal.raise_signal(signal.SIGTERM)


@dataclass
class ConsoleLogger(RunListener, Group):
    """Shows iteration, phase and how far it is, metrics, last evaluation and remaining time: live on a terminal,
    otherwise a line a record, and in long phases one every 30 s.
    """

    key: ClassVar[str] = "logger.console"

    refresh_per_s: Annotated[float, above(0)]
    names: Names

    def __post_init__(self) -> None:
        super().__post_init__()
        self.console = output_console()
        self.console.on_broken_pipe = save_and_end
        self._live: Live | None = None
        self._ends: threading.Event | None = None  # set when no more lines about silent phases are wanted
        self._spinner = Spinner("dots")
        self._num_iterations = 0  # before `start`
        self._num_done = 0
        self._phase, self._has_ended = "", False
        self._began_s = self._phase_began_s = self._last_mark_s = self._last_line_s = time.monotonic()
        self._progress: Mapping[str, tuple[int, int]] = {}  # unit -> done, total
        self._train: Metrics = {}
        self._eval: tuple[int, Metrics] | None = None
        self._iteration_s: deque[float] = deque(maxlen=ITERATIONS_IN_ESTIMATE)

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        self._num_iterations = num_iterations
        self._go_live()
        if self._live is not None:
            self._live.transient = False

    def phase(self, name: str, iteration: int) -> None:
        self._progress = {}
        self._phase, self._phase_began_s = name, time.monotonic()
        self._began_s = self._phase_began_s - progress.elapsed_s()
        if name == "generate" and not self._iteration_s:  # what came before is no part of an iteration
            self._last_mark_s = self._phase_began_s
        self._num_done = max(self._num_done, iteration)  # an evaluation is of an iteration that is already counted
        self._go_live()

    def progress(self, done: int, total: int, unit: str) -> None:
        # A new dict: another thread may be drawing the old one.
        self._progress = {**self._progress, unit: (done, total)}

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self._num_done, now_s = iteration + 1, time.monotonic()
        # One line of training metrics, as many as it has room for, two at least; one or more of an evaluation.
        if name == "eval":
            self._eval = (iteration, metrics)
            lines = folded(f"{self._at()}{GAP}eval", eval_cells(metrics), width=self.console.width)
        else:
            self._train = metrics
            self._iteration_s.append(now_s - self._last_mark_s)
            self._last_mark_s = now_s
            cells = [f"{label} {value}" for label, value in train_cells(metrics)]
            ends = f"{self._time_left()} left"
            while len(cells) > 2 and len(GAP.join([self._at(), *cells, ends])) > self.console.width:
                cells.pop()
            lines = [GAP.join([self._at(), *cells, ends])]
        # run.log has the lines in any case; a live display shows the same numbers, a file the lines.
        for line in lines:
            messages.info(line, extra=progress.LOG_ALONE)
        if self._live is None:
            self._print(lines)
        if self.names == "atropos" and name == "train":
            self._print(console_lines(self._at().lstrip(), metrics))

    def close(self) -> None:
        """Draw the last state and restore the terminal and its cursor."""
        if self._ends is not None:
            self._ends.set()
        live, self._live = self._live, None
        if live is not None:
            is_early = "stopped_early" in {**self._train, **(self._eval[1] if self._eval is not None else {})}
            is_done = self._num_done >= self._num_iterations or is_early
            self._phase, self._progress, self._has_ended = "done" if is_done else "stopped", {}, True
            live.stop()

    def _go_live(self) -> None:
        """Begin to draw, on a terminal. Before `start` it is transient, so that an error stands alone."""
        if self.console.is_terminal and self._live is None:
            how: dict[str, Any] = {"console": self.console, "refresh_per_second": self.refresh_per_s}
            self._live = Live(get_renderable=self._render, transient=not self._num_iterations, **how)
            self._live.start()
        elif not self.console.is_terminal and self._ends is None:
            self._ends = threading.Event()
            threading.Thread(target=self._break_silence, args=[self._ends], daemon=True).start()

    def _break_silence(self, ends: threading.Event) -> None:
        """In a thread: a long phase, which may be a wait for others, would look like a hang."""
        while not ends.wait(1.0):
            if time.monotonic() - self._last_line_s >= SILENCE_S:
                at = [self._at()] if self._num_iterations else []
                self._print([GAP.join([*at, self._phase, self._how_far()])])

    def _print(self, lines: Iterable[str]) -> None:
        self._last_line_s = time.monotonic()
        self.console.print("\n".join(lines), markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _at(self) -> str:
        """`  3/100`."""
        return f"{self._num_done:>{len(str(self._num_iterations))}}/{self._num_iterations}"

    def _time_left(self) -> str:
        if not self._iteration_s:
            return "-"
        mean_s = sum(self._iteration_s) / len(self._iteration_s)
        return clock(mean_s * max(self._num_iterations - self._num_done, 0))

    def _how_far(self) -> str:
        """How far the phase is, in each unit that is not complete, and how long it has taken."""
        shown = [(unit, done, total) for unit, (done, total) in self._progress.items() if done < total > 1 or not total]
        parts = [f"{done:,}{f'/{total:,}' * bool(total)} {unit}{GAP}" for unit, done, total in shown]
        took_s = time.monotonic() - self._phase_began_s
        done, total = self._progress.get("steps", (0, 0))  # of a warm start, which take equally long
        left = f", about {clock(took_s / done * (total - done))} left" if 0 < done < total else ""
        return "".join(parts) + clock(took_s) + left

    def _render(self) -> RenderableType:
        """The live display: iteration, phase, metrics, last evaluation."""
        rows: list[RenderableType] = []
        if self._num_iterations:
            done, total = self._num_done, self._num_iterations
            times = Text(f"{clock(time.monotonic() - self._began_s)} elapsed, {self._time_left()} left", "dim")
            columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
            row = Table.grid(*columns, padding=(0, 2, 0, 0), expand=True)
            row.add_row(f"iteration {done}/{total}", ProgressBar(total=total, completed=done), times)
            rows.append(row)
        if self._has_ended:
            rows.append(Text(self._phase, "bold"))
        else:
            self._spinner.update(text=Text.assemble((self._phase, "bold"), GAP, (self._how_far(), "dim")))
            rows.append(self._spinner)
        if self._train:
            cells = (Text.assemble((name, "dim"), "\n", (value, "bold")) for name, value in train_cells(self._train))
            rows.append(Columns(cells, width=CELL_WIDTH, padding=0))
        if self._eval is not None:
            iteration, metrics = self._eval
            when = "eval before training" if iteration == -1 else f"eval after {iteration + 1}"
            rows += [Text(line) for line in folded(when, eval_cells(metrics), width=self.console.width)]
        return Stack(*rows)


def train_cells(metrics: Metrics) -> list[tuple[str, str]]:
    """(label, formatted value) of the fields that are present; for example, there is no KL without a reference."""
    return [(label, form.format(metrics[key])) for label, key, form in TRAIN_FIELDS if key in metrics]


def eval_cells(metrics: Metrics) -> list[str]:
    """`pass@1 0.431 [0.380, 0.490]` for each k, with its 95% interval."""
    ks = sorted(int(key[5:]) for key in metrics if key.startswith("pass@") and key[5:].isdigit())
    keys = [f"pass@{k}" for k in ks]
    cells = [f"{key} {metrics[key]:.3f} [{metrics[f'{key}_low']:.3f}, {metrics[f'{key}_high']:.3f}]" for key in keys]
    return [*cells, "frozen server, not the policy"] if "sync/frozen" in metrics else cells


def folded(head: str, cells: Sequence[str], *, width: int) -> list[str]:
    """Lines of at most `width`; a cell that has no room goes to the next line, below the first cell."""
    lines = [head]
    for cell in cells:
        is_first = len(lines) == 1 and lines[0] == head
        if not is_first and len(lines[-1]) + len(GAP) + len(cell) > width:
            lines.append(" " * len(head))
        lines[-1] += GAP + cell
    return lines


def clock(seconds: float) -> str:
    """`1:02:03`, hours first."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def short(name: str, letters: int) -> str:
    """The beginning of a name that is longer."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"
