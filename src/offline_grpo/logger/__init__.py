"""Listeners that write the metrics of a run. The JSON files are the primary record."""

from __future__ import annotations

import os

import rich
from rich.console import Console
from rich.table import Table

from offline_grpo.types import Metrics


def output_console() -> Console:
    """The one console of the process. A file has 80 columns, unless the environment variable COLUMNS says otherwise."""
    console = rich.get_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 80
    return console


def print_table(console: Console, table: Table) -> None:
    """Print it. On a console of fewer than 80 columns, lines fold: otherwise numbers would be cut."""
    if console.width < 80:
        console = Console(file=console.file, width=80, force_terminal=console.is_terminal)
    console.print(table)


def completed_iterations(name: str, iteration: int) -> int:
    """Training iterations behind the policy that the metrics of phase `name` describe: the x axis of every plot.

    Training metrics are of the policy before the update of their iteration, evaluations of the one after it.
    """
    return iteration + 1 if name == "eval" else iteration


def tagged(name: str, metrics: Metrics) -> dict[str, float]:
    """Metrics as W&B and TensorBoard name them: `eval/pass@1`, and `eval_intervals/pass@1_low` for bounds."""
    bounds = {f"{key}_{end}" for key in metrics for end in ("low", "high")} & metrics.keys()
    return {f"{name}_intervals/{key}" if key in bounds else f"{name}/{key}": value for key, value in metrics.items()}
