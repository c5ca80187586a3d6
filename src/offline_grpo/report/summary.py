"""The table at the end of a run: results, time, speed and output folder."""

from __future__ import annotations

from textwrap import wrap

from rich.console import Console

from offline_grpo.logger.atropos import Benchmark
from offline_grpo.logger.console import folded
from offline_grpo.report.figures import bounds_of, series_of
from offline_grpo.report.findings import find
from offline_grpo.report.history import History, duration
from offline_grpo.report.tables import Table, say, with_interval

LABEL_WIDTH = 17
MAX_TASKS = 12  # of a mixture, with a line of results each
SMALLEST_PART = 0.01  # of the start, to be named


def print_summary(history: History, console: Console) -> None:
    """Results before training, at the end and at best; time, speed and memory; what to look at; the folder."""
    if not history.train and not history.evals:
        return
    say(console, [history.size])
    results_table(history).print(console)
    lines = []
    # The shares of the phases, and what the start consisted of, the longest part first.
    if (total_s := history.total_s) > 0:
        shares = [f"{phase} {seconds / total_s:.0%}" for phase, seconds in history.phase_seconds().items()]
        lines += folded(labelled("time", "")[:-2], [duration(total_s), *shares], width=console.width)
    start = history.start_seconds()
    start_s = start.pop("", 0.0)
    parts = [name for name in sorted(start, key=lambda name: -start[name]) if start[name] >= SMALLEST_PART * start_s]
    if parts and total_s > 0:
        cells = [duration(start_s), *(f"{name} {duration(start[name])}" for name in parts)]
        lines += folded(labelled("start", "")[:-2], cells, width=console.width)
    # Throughput over the whole run, and the most memory that the trainer had on its GPU.
    cost = Benchmark([*history.train.values()])
    rates = {phase: cost.tokens_per_s(phase) for phase in ("generate", "train")}
    if cells := [f"{phase} {rate:,.0f} tokens/s" for phase, rate in rates.items() if rate]:
        lines.append(labelled("throughput", "  ".join(cells)))
    held, reserved = (history.series("train", f"perf/gpu_memory_{name}gb").values for name in ("", "reserved_"))
    if len(held) and len(reserved):
        text = f"peak {held.max():.1f} GB in tensors, {reserved.max():.1f} GB reserved"
        lines.append(labelled("GPU memory", text))
    # What to look at, and what to try; the label stands once.
    label, room = "look at", max(console.width - LABEL_WIDTH, LABEL_WIDTH)
    for text in (text for each in find(history) for text in (each.observation, f"try: {each.advice}")):
        for line in wrap(text, room, break_on_hyphens=False, break_long_words=False):
            lines.append(labelled(label, line))
            label = ""
    say(console, [*lines, labelled("files", history.run_dir)])


def labelled(label: str, text: object) -> str:
    """A line of the summary."""
    return f"{label:{LABEL_WIDTH}}{text}"


def results_table(history: History) -> Table:
    """Before training, at the end, and the best with the iteration after which, or in which, it was measured."""
    labels = {f"eval/pass@{k}": f"pass@{k}" for k in history.eval_ks()[:1]}
    labels |= {f"eval/task/{task}/pass@1": f"pass@1 of {task}" for task in history.tasks()[:MAX_TASKS]}
    labels |= {f"eval/pass@{k}": f"pass@{k}" for k in history.eval_ks()[1:]}
    labels |= {"train/reward_mean": "training reward", "train/success_rate": "success rate"}
    rows = []
    for metric, label in labels.items():
        series, is_training = series_of(history, metric), metric.startswith("train/")
        if not len(series):
            continue
        # Of training, the first and the last iteration; "before" and "after" of an evaluation only where it was one.
        bounds = None if is_training else bounds_of(history, metric)
        first, last = (
            with_interval(float(series.values[i]), None if bounds is None else (bounds[0][i], bounds[1][i]))
            for i in (0, -1)
        )
        best = int(series.values.argmax())
        best_cell = f"{series.values[best]:.3f} ({series.steps[best] + is_training:.0f})"
        has_first, has_last = series.steps[0] == 0, series.steps[-1] > 0 or is_training
        rows.append([label, first if has_first else "", last if has_last else "", best_cell])
    return Table(["", "before [95%]", "after [95%]", "best (iteration)"], rows)
