"""Where the metrics of a run go. JSON files are the record; the other listeners show the same numbers elsewhere."""

from __future__ import annotations


def completed_iterations(name: str, iteration: int) -> int:
    """How many iterations of training the policy had behind it that the metrics of phase `name` describe: the x axis of every plot.

    Training metrics of iteration i come from rollouts of the policy before its update, evaluation i follows it; the evaluation before
    any training (iteration -1) therefore stands at 0, where training iteration 0 begins.
    """
    return iteration + 1 if name == "eval" else iteration
