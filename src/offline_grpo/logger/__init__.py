"""Listeners that write the metrics of a run. The JSON files are the record: plots, summaries and sweep tables are made
only from them.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import rich
from rich.console import Console
from rich.table import Table

from offline_grpo.disk import write_whole
from offline_grpo.errors import GrpoError
from offline_grpo.interfaces import RunListener
from offline_grpo.types import Metrics


@dataclass(frozen=True)
class JsonLogger(RunListener):
    """Writes `metrics/train_iter_000.json`, `metrics/eval_iter_000.json`, ... and `metrics/eval_init.json`.

    A file is complete or absent. Keys are sorted, so equal metrics give equal bytes.
    """

    output_dir: Path

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        """Write one file. Raises GrpoError for NaN and infinity, which JSON cannot represent."""
        suffix = suffix_of(iteration)
        for key, value in metrics.items():
            if not math.isfinite(value):
                raise GrpoError(f"{name} metric {key} is {value} ({suffix}); metrics must be finite numbers")
        path = self.output_dir / "metrics" / f"{name}_{suffix}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dict(metrics), indent=2, sort_keys=True, allow_nan=False) + "\n")


def suffix_of(iteration: int) -> str:
    """What ends the names of an iteration's records: `iter_004`, or `init` of the evaluation before training."""
    return "init" if iteration == -1 else f"iter_{iteration:03d}"


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
