"""Outputs for the metrics of a run. The JSON files are the primary record; the other listeners show the same numbers elsewhere."""

from __future__ import annotations

import os

import rich
from rich.console import Console


def output_console() -> Console:
    """The one console of the process, so that lines and the live display do not disturb each other.

    A file has 80 columns, whatever the terminal has that the command was typed in; the environment variable COLUMNS changes that.
    """
    console = rich.get_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 80
    return console


def completed_iterations(name: str, iteration: int) -> int:
    """Number of training iterations behind the policy that the metrics of phase `name` describe: the x axis of every plot.

    Training metrics of iteration i come from rollouts of the policy before its update; evaluation i comes after the update. So the
    evaluation before any training (iteration -1) is at 0, like training iteration 0.
    """
    return iteration + 1 if name == "eval" else iteration
