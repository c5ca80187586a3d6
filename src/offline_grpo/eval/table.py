"""The results of an evaluation as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from offline_grpo.eval.paired import PairedResult
from offline_grpo.types import Metrics

WIDTH = 80


def results_table(
    models: Mapping[str, str], metrics: Mapping[tuple[str, str], Metrics], ks: Mapping[str, Sequence[int]]
) -> list[str]:
    """A line for each model's name, then a row for each set and model: pass@k with 95% intervals, for the smallest and
    the largest k.

    Sets whose short names are the same have numbers, and a line for each name at the end. More than two k are told two
    at a time.

    Args:
        models: what each short name stands for.
        metrics: (model, set) -> metrics.
        ks: set -> its k.
    """
    lines = [f"{letter}  {_shortened(name, WIDTH - 3)}" for letter, name in models.items()]
    labels = {name: _shortened(name, 18) for _, name in metrics}
    legend: list[str] = []
    if len(set(labels.values())) < len(labels):
        labels = {name: f"{number}" for number, name in enumerate(labels, 1)}
        legend = ["", *(line for name, label in labels.items() for line in _wrapped(f"{label}  {name}"))]
    shown = [f"pass@{k}" for k in sorted({k for name in labels for k in (min(ks[name]), max(ks[name]))})]
    for keys in (shown[i : i + 2] for i in range(0, len(shown), 2)):
        lines += ["", _row("set", "problems", "", [f"{key} [95%]" for key in keys])]
        for name, label in labels.items():
            for letter in models:
                found = metrics.get((letter, name), {})
                if any(key in found for key in keys):
                    cells = [
                        f"{found[k]:.3f} [{found[f'{k}_low']:.3f}, {found[f'{k}_high']:.3f}]" if k in found else ""
                        for k in keys
                    ]
                    lines.append(_row(label, f"{found['tasks']:.0f}", letter, cells))
    return lines + legend


def comparison_lines(first: str, comparisons: Mapping[tuple[str, str], PairedResult]) -> list[str]:
    """What the paired tests say, two lines for each, or more if its name is long; and what they are about."""
    lines = []
    for (letter, name), found in comparisons.items():
        ends = f"[{found.low:+.3f}, {found.high:+.3f}]"
        lines += _wrapped(f"{letter} - {first} on {name}: {found.difference:+.3f} {ends}, {p_text(found.p_value)}")
        counts = f"better on {found.num_better} and worse on {found.num_worse}"
        lines.append(f"    {counts} of {found.num_problems} problems")
    return [*lines, "this compares models; to compare settings, train several seeds of each"] if lines else []


def p_text(p_value: float) -> str:
    """`p = 0.0312`, `p < 0.0001`."""
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.4f}"


def truncation_lines(metrics: Mapping[tuple[str, str], Any], limit: float = 0.2) -> list[str]:
    """A warning for every model and set of which many completions had no room to end."""
    return [
        line
        for (letter, name), found in metrics.items()
        if found["truncated_frac"] > limit
        for line in _wrapped(
            f"{letter} on {name}: {found['truncated_frac']:.0%} of the completions were cut; raise eval.max_new_tokens"
        )
    ]


def _row(name: str, num_problems: str, letter: str, cells: Sequence[str]) -> str:
    return f"{name:<18} {num_problems:>8}  {letter:<2}" + "".join(f"  {cell:<22}" for cell in cells).rstrip()


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[-(width - 3) :]
