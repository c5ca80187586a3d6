"""Progress display: a live panel on a terminal, one line per record otherwise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.types import Metrics

TRAIN_FIELDS = (
    # label, metric key, format
    ("reward", "reward_mean", "{:.3f}"),
    ("success", "success_rate", "{:.1%}"),
    ("loss", "loss_total", "{:+.4f}"),
    ("KL", "kl_divergence", "{:.4f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
    ("clipped", "clip_frac", "{:.1%}"),
    ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
    ("server", "sync/frozen", "frozen"),
)
FINAL_PHASES = ("done", "stopped")
ITERATIONS_IN_ESTIMATE = 10  # the remaining time is estimated from the last 10 iterations


@dataclass
class ConsoleLogger(RunListener):
    """Shows iteration, metrics, last evaluation, phase and remaining time: live on a terminal, otherwise one line per record.

    Args:
        refresh_per_s: refresh rate of the live display, in Hz.
    """

    refresh_per_s: float
    console: Console = field(default_factory=Console, init=False, repr=False)
    _live: Live | None = field(default=None, init=False, repr=False)
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots"), init=False, repr=False)
    _num_iterations: int = field(default=0, init=False, repr=False)
    _num_done: int = field(default=0, init=False, repr=False)
    _phase: str = field(default="starting", init=False, repr=False)
    _train: Metrics = field(default_factory=dict, init=False, repr=False)
    _eval: tuple[int, Metrics] | None = field(default=None, init=False, repr=False)
    _started_s: float = field(default=0.0, init=False, repr=False)
    _last_mark_s: float = field(default=0.0, init=False, repr=False)
    _iteration_s: deque[float] = field(default_factory=lambda: deque(maxlen=ITERATIONS_IN_ESTIMATE), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.refresh_per_s <= 0:
            raise ConfigError(f"logger.console.refresh_per_s={self.refresh_per_s}: must be above 0, for example 4")

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        self._num_iterations = num_iterations
        self._started_s = self._last_mark_s = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=self.refresh_per_s)
            self._live.start()

    def phase(self, name: str, iteration: int) -> None:
        """Show the current phase ("generate", "train", ...), on the live display only."""
        self._phase = name
        self._num_done = max(iteration, 0)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        if name == "eval":
            self._eval = (iteration, metrics)
            line = eval_line(metrics)
        else:
            self._train = metrics
            self._num_done = iteration + 1
            line = train_line(metrics)
        self._mark_time(name, iteration)
        if self._live is None:
            at = "before training" if iteration == -1 else f"iteration {iteration + 1}/{self._num_iterations}"
            left = "" if name == "eval" else f" | {self._time_left()} left"
            self.console.print(f"{at} | {name} | {line}{left}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the last state and restore the terminal and its cursor. Safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            self._phase = FINAL_PHASES[0] if self._num_done >= self._num_iterations else FINAL_PHASES[1]
            live.stop()

    def _mark_time(self, name: str, iteration: int) -> None:
        """Record the duration of an iteration, including its evaluation; the evaluation before training belongs to no iteration."""
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
        done, total = self._num_done, self._num_iterations
        self._spinner.update(text=Text(self._phase, "bold"))
        header = Table.grid(padding=(0, 2))
        header.add_row(
            Text(f"iteration {done}/{total}"),
            ProgressBar(total=max(total, 1), completed=done, width=32),
            Text(self._phase, "bold") if self._phase in FINAL_PHASES else self._spinner,
            Text(f"{clock(time.monotonic() - self._started_s)} elapsed, {self._time_left()} left", "dim"),
        )
        rows: list[RenderableType] = [header]
        if self._train:
            rows.append(metric_row(train_cells(self._train)))
        if self._eval is not None:
            iteration, metrics = self._eval
            when = "eval before training" if iteration == -1 else f"eval after iteration {iteration + 1}"
            rows.append(Text.assemble((f"{when}  ", "dim"), eval_line(metrics)))
        return Group(*rows)


def train_cells(metrics: Metrics) -> list[tuple[str, str]]:
    """(label, formatted value) of the fields that are present; for example, there is no KL without a reference."""
    return [(label, form.format(metrics[key])) for label, key, form in TRAIN_FIELDS if key in metrics]


def train_line(metrics: Metrics) -> str:
    """`reward 0.412 | success 37.5% | loss -0.0123 | ...`"""
    return " | ".join(f"{label} {value}" for label, value in train_cells(metrics))


def eval_line(metrics: Metrics) -> str:
    """`pass@1 0.431 [0.380, 0.490] | pass@4 0.610 [0.550, 0.670]`, each with its 95 % interval."""
    keys = sorted((key for key in metrics if key.startswith("pass@") and key[5:].isdigit()), key=lambda key: int(key[5:]))
    cells = [f"{key} {metrics[key]:.3f} [{metrics[f'{key}_low']:.3f}, {metrics[f'{key}_high']:.3f}]" for key in keys]
    return " | ".join([*cells, "frozen server, not the policy"] if "sync/frozen" in metrics else cells)


def metric_row(cells: list[tuple[str, str]]) -> Table:
    """Labels above values, in columns of constant position."""
    grid = Table.grid(padding=(0, 3))
    for _ in cells:
        grid.add_column(justify="right", min_width=8)
    grid.add_row(*(Text(label, "dim") for label, _ in cells))
    grid.add_row(*(Text(value, "bold") for _, value in cells))
    return grid


def clock(seconds: float) -> str:
    """`1:02:03`, hours first."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
