"""The results of an evaluation as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offline_grpo.eval.paired import PairedResult
from offline_grpo.types import Metrics

WIDTH = 80


def results_table(models: Mapping[str, str], metrics: Mapping[tuple[str, str], Metrics], ks: Sequence[int]) -> list[str]:
    """A line for each model's name, then a row for each set and model: pass@k with 95% intervals, for the smallest and the largest k.

    Args:
        models: what each short name stands for.
        metrics: (model, set) -> metrics.
    """
    lines = [f"{letter}  {_shortened(name, WIDTH - 3)}" for letter, name in models.items()]
    shown = [f"pass@{k}" for k in sorted({min(ks), max(ks)})]
    lines += ["", _row("set", "problems", "", [(f"{key} [95%]") for key in shown])]
    sets = dict.fromkeys(name for _, name in metrics)
    for name in sets:
        for letter in models:
            if (letter, name) in metrics:
                found = metrics[letter, name]
                cells = [f"{found[key]:.3f} [{found[f'{key}_low']:.3f}, {found[f'{key}_high']:.3f}]" for key in shown]
                lines.append(_row(_shortened(name, 18), f"{found['tasks']:.0f}", letter, cells))
    return lines


def comparison_lines(first: str, comparisons: Mapping[tuple[str, str], PairedResult]) -> list[str]:
    """What the paired tests say, two lines for each."""
    lines = []
    for (letter, name), found in comparisons.items():
        lines.append(
            f"{letter} - {first} on {_shortened(name, 40)}: {found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}], {p_text(found)}"
        )
        lines.append(f"    better on {found.num_better} and worse on {found.num_worse} of {found.num_problems} problems")
    return lines


def p_text(found: PairedResult) -> str:
    """`p = 0.031`, `p < 0.0001`."""
    return "p < 0.0001" if found.p_value < 1e-4 else f"p = {found.p_value:.4f}"


def truncation_lines(metrics: Mapping[tuple[str, str], Any], limit: float = 0.2) -> list[str]:
    """A warning for every model and set of which many completions had no room to end."""
    return [
        f"{letter} on {_shortened(name, 30)}: {found['truncated_frac']:.0%} of the completions were cut; raise eval.max_new_tokens"
        for (letter, name), found in metrics.items()
        if found["truncated_frac"] > limit
    ]


def _row(name: str, num_problems: str, letter: str, cells: Sequence[str]) -> str:
    return f"{name:<18} {num_problems:>8}  {letter:<2}" + "".join(f"  {cell:<22}" for cell in cells).rstrip()


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[-(width - 3) :]
