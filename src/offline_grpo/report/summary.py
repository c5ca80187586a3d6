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
    lines = [*_time(history, console.width), *_rates(history), *_findings(history, console.width)]
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
    rows = [[label, *_result(history, metric)] for metric, label in labels.items() if len(series_of(history, metric))]
    return Table(["", "before [95%]", "after [95%]", "best (iteration)"], rows)


def _result(history: History, metric: str) -> tuple[str, str, str]:
    """Cells; of training the first, last and best iteration."""
    series, is_training = series_of(history, metric), metric.startswith("train/")
    bounds = None if is_training else bounds_of(history, metric)
    first, last = (
        with_interval(float(series.values[i]), None if bounds is None else (bounds[0][i], bounds[1][i]))
        for i in (0, -1)
    )
    best = int(series.values.argmax())
    has_first, has_last = series.steps[0] == 0, series.steps[-1] > 0 or is_training
    best_cell = f"{series.values[best]:.3f} ({series.steps[best] + is_training:.0f})"
    return first if has_first else "", last if has_last else "", best_cell


def _time(history: History, width: int) -> list[str]:
    total_s, start = history.total_s, history.start_seconds()
    if total_s == 0:
        return []
    shares = [f"{phase} {seconds / total_s:.0%}" for phase, seconds in history.phase_seconds().items()]
    lines = folded(labelled("time", "")[:-2], [duration(total_s), *shares], width=width)
    start_s = start.pop("", 0.0)
    parts = [name for name in sorted(start, key=lambda name: -start[name]) if start[name] >= SMALLEST_PART * start_s]
    if parts:
        cells = [duration(start_s), *(f"{name} {duration(start[name])}" for name in parts)]
        lines += folded(labelled("start", "")[:-2], cells, width=width)
    return lines


def _rates(history: History) -> list[str]:
    """Throughput over the whole run, and the most memory that the trainer had on its GPU."""
    cost = Benchmark([*history.train.values()])
    rates = {phase: cost.tokens_per_s(phase) for phase in ("generate", "train")}
    cells = [f"{phase} {rate:,.0f} tokens/s" for phase, rate in rates.items() if rate]
    lines = [labelled("throughput", "  ".join(cells))] if cells else []
    held, reserved = (history.series("train", f"perf/gpu_memory_{name}gb").values for name in ("", "reserved_"))
    if len(held) and len(reserved):
        text = f"peak {held.max():.1f} GB in tensors, {reserved.max():.1f} GB reserved"
        lines.append(labelled("GPU memory", text))
    return lines


def _findings(history: History, width: int) -> list[str]:
    """What to look at, and what to try."""
    texts = [text for each in find(history) for text in (each.observation, f"try: {each.advice}")]
    room = max(width - LABEL_WIDTH, LABEL_WIDTH)
    lines = [line for text in texts for line in wrap(text, room, break_on_hyphens=False, break_long_words=False)]
    return [labelled("" if i else "look at", line) for i, line in enumerate(lines)]
