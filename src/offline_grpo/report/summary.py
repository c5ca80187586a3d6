"""The table at the end of a run: results, time, speed and output folder."""

from __future__ import annotations

import textwrap

from rich.console import Console

from offline_grpo.logger.lines import folded, short
from offline_grpo.report.findings import find
from offline_grpo.report.history import History, Series

LABEL_WIDTH = 16
MAX_TASKS = 12  # the report's page has these too
RESULT_WIDTH = 20  # of `0.917 [0.895, 0.938]`
SMALLEST_PART = 0.01  # of the start, to be named


def print_summary(history: History, console: Console) -> None:
    """Print `summary_lines`, unless the run recorded no metrics. The folder stays in one piece, however long."""
    if history.train or history.evals:
        for line in summary_lines(history, width=console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_lines(history: History, *, width: int) -> list[str]:
    """What was measured before training, at the end and at best; time, speed and memory; what to look at; the folder."""
    lines = [
        history.size,
        "".rjust(LABEL_WIDTH)
        + "  ".join(["before".ljust(RESULT_WIDTH), "after".ljust(RESULT_WIDTH), "best (iteration)"]),
    ]
    for k in history.eval_ks():
        lines.append(_result(history, "eval", f"pass@{k}", f"pass@{k}"))
        if k == 1:  # of a mixture, that of each task
            tasks = history.held_out_tasks()[:MAX_TASKS]
            lines += [
                _result(history, "eval", f"task/{task}/pass@1", f"  {short(task, LABEL_WIDTH - 3)}") for task in tasks
            ]
    for label, key in (("training reward", "reward_mean"), ("success rate", "success_rate")):
        if len(history.series("train", key)):
            lines.append(_result(history, "train", key, label))
    lines += _time(history, width)
    lines += _rates(history)
    lines += _findings(history, width)
    return [line.rstrip() for line in [*lines, "files".ljust(LABEL_WIDTH) + str(history.run_dir)]]


def _result(history: History, name: str, key: str, label: str) -> str:
    """`pass@1  0.512 [0.479, 0.547]  0.917 [0.895, 0.938]  0.920 (90)`; of training the first, last and best
    iteration."""
    values, low, high = (history.series(name, f"{key}{end}") for end in ("", "_low", "_high"))
    index = values.best()
    best = (
        "" if index is None else f"{values.values[index]:.3f} ({values.steps[index] + (name == 'train'):.0f})"
    )  # which begins there
    first = with_interval(values, low, high, 0) if values.steps[0] == 0 else ""
    last = with_interval(values, low, high, -1) if values.steps[-1] > 0 or name == "train" else ""
    return label.ljust(LABEL_WIDTH) + "  ".join([first.ljust(RESULT_WIDTH), last.ljust(RESULT_WIDTH), best])


def with_interval(values: Series, low: Series, high: Series, index: int) -> str:
    """`0.917 [0.895, 0.938]`, or without the interval where it was not measured."""
    if not len(values) == len(low) == len(high):
        return f"{values.values[index]:.3f}"
    return f"{values.values[index]:.3f} [{low.values[index]:.3f}, {high.values[index]:.3f}]"


def _time(history: History, width: int) -> list[str]:
    _, seconds = history.phase_seconds()
    start = history.start_seconds()
    start_s = start.pop("", 0.0)
    total_s = start_s + sum(float(values.sum()) for values in seconds.values())
    if total_s == 0:
        return []
    shares = {"start": start_s, **{phase: float(values.sum()) for phase, values in seconds.items()}}
    cells = [duration(total_s), *(f"{phase} {share / total_s:.0%}" for phase, share in shares.items() if share > 0)]
    lines = _row("time", cells, width)
    parts = sorted(
        ((name, part) for name, part in start.items() if part >= SMALLEST_PART * start_s), key=lambda pair: -pair[1]
    )
    if parts:
        lines += _row("start", [duration(start_s), *(f"{name} {duration(part)}" for name, part in parts)], width)
    return lines


def _rates(history: History) -> list[str]:
    """Throughput over the whole run: all tokens of a phase by all its seconds. The most memory that the trainer had on
    its GPU.
    """
    cells: list[str] = []
    for phase, time, key in (
        ("generate", "sampling", "num_completion_tokens"),
        ("train", "train", "num_tokens_trained"),
    ):
        records = [record for record in history.train.values() if key in record and f"time/{time}_s" in record]
        if seconds := sum(record[f"time/{time}_s"] for record in records):
            cells.append(f"{phase} {sum(record[key] for record in records) / seconds:,.0f} tokens/s")
    lines = ["throughput".ljust(LABEL_WIDTH) + "  ".join(cells)] if cells else []
    held, reserved = (history.series("train", f"perf/gpu_memory_{name}gb").values for name in ("", "reserved_"))
    if len(held) and len(reserved):
        lines.append(
            "GPU memory".ljust(LABEL_WIDTH) + f"peak {held.max():.1f} GB in tensors, {reserved.max():.1f} GB reserved"
        )
    return lines


def _findings(history: History, width: int) -> list[str]:
    """What to look at, and what to try."""
    lines: list[str] = []
    for finding in find(history):
        for text in (finding.observation, f"try: {finding.advice}"):
            lines += textwrap.wrap(
                text, max(width - LABEL_WIDTH, LABEL_WIDTH), break_on_hyphens=False, break_long_words=False
            )
    return [("" if i else "look at").ljust(LABEL_WIDTH) + line for i, line in enumerate(lines)]


def _row(label: str, cells: list[str], width: int) -> list[str]:
    return folded(label.ljust(LABEL_WIDTH - 2), cells, width=width)


def duration(seconds: float) -> str:
    """`5.2 s`, `3.4 min` or `2.1 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
