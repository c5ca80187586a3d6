"""Outputs for the metrics of a run. The JSON files are the primary record; the other listeners show the same numbers
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich
import yaml
from rich.console import Console
from rich.table import Table

from offline_grpo.types import Metrics


def output_console() -> Console:
    """The one console of the process, so that lines and the live display do not disturb each other.

    A file has 80 columns, whatever the terminal has that the command was typed in; the environment variable COLUMNS
    changes that.
    """
    console = rich.get_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 80
    return console


def print_table(console: Console, table: Table, *, least_width: int) -> None:
    """Print it. On a console of fewer than `least_width` columns, lines fold: otherwise numbers would be cut."""
    if console.width < least_width:
        console = Console(file=console.file, width=least_width, force_terminal=console.is_terminal)
    console.print(table)


def completed_iterations(name: str, iteration: int) -> int:
    """Number of training iterations behind the policy that the metrics of phase `name` describe: the x axis of every
    plot.

    Training metrics of iteration i come from rollouts of the policy before its update; evaluation i comes after the
    update. So the evaluation before any training (iteration -1) is at 0, like training iteration 0.
    """
    return iteration + 1 if name == "eval" else iteration


def tagged(name: str, metrics: Metrics) -> dict[str, float]:
    """Metrics as W&B and TensorBoard name them: `train/KEY`, `eval/KEY`, and the bounds of intervals in a section of
    their own.

    Example: `pass@1` and `pass@1_low` of an evaluation are `eval/pass@1` and `eval_intervals/pass@1_low`.
    """
    bounds = {f"{key}_{end}" for key in metrics for end in ("low", "high")} & metrics.keys()
    return {f"{name}_intervals/{key}" if key in bounds else f"{name}/{key}": value for key, value in metrics.items()}


def sweep_folder(output_dir: Path) -> Path | None:
    """The folder of the sweep that a run belongs to, by what Hydra stored about the run; None outside a sweep."""
    stored = output_dir / ".hydra" / "hydra.yaml"
    if not stored.is_file():
        return None
    settings: Mapping[str, Any] = yaml.safe_load(stored.read_text())["hydra"]
    if settings["mode"] != "MULTIRUN":
        return None
    return output_dir.resolve().parents[len(Path(settings["sweep"]["subdir"]).parts) - 1]
