"""Tables of a run, of a sweep and of an evaluation, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from textwrap import wrap
from typing import Any

import rich.table
from rich.console import Console
from rich.text import Text

from offline_grpo.eval.statistics import PairedResult, p_text
from offline_grpo.logger import print_table
from offline_grpo.logger.atropos import Benchmark
from offline_grpo.logger.console import folded
from offline_grpo.report.configurations import Configuration
from offline_grpo.report.findings import find
from offline_grpo.report.runs import Run, duration
from offline_grpo.types import Metrics

LABEL_WIDTH = 17
MAX_TASKS = 12  # of a mixture, with a line of results each
SMALLEST_PART = 0.01  # of the start, to be named
RESULTS = ("pass@1 [95%]", "best", "reward", "minutes")
MANY_CUT = 0.2  # of an evaluation's completions


@dataclass(frozen=True)
class Table:
    """Cells of text; every row has one for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self, console: Console, *, num_folding: int = 1) -> None:
        """Aligned columns without those that are empty; cells of the first `num_folding` fold where they must."""
        shown = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        table = rich.table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
        for i in shown:
            table.add_column(Text(self.columns[i]), overflow="fold", no_wrap=i >= num_folding)
        for row in self.rows:
            table.add_row(*(Text(row[i]) for i in shown))
        print_table(console, table)

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def say(console: Console, lines: Iterable[object]) -> None:
    """Print lines as they are; the terminal folds what is too wide, so that a path stays in one piece."""
    for line in lines:
        console.print(str(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


def labelled(label: str, text: object) -> str:
    """A line of the summary."""
    return f"{label:{LABEL_WIDTH}}{text}"


def number(value: float | None, form: str = ".3f", *, empty: str = "") -> str:
    """A cell."""
    return empty if value is None else format(value, form)


def with_interval(value: float | None, interval: tuple[float | None, float | None] | None) -> str:
    """`0.917 [0.895, 0.938]`."""
    low, high = interval or (None, None)
    return number(value) + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


# A run.


def print_summary(run: Run, console: Console) -> None:
    """Results before training, at the end and at best; time, speed and memory; what to look at; the folder."""
    if not run.train and not run.evals:
        return
    say(console, [run.size])
    results_table(run).print(console)
    lines = []
    # The shares of the phases, and what the start consisted of, the longest part first.
    if (total_s := run.total_s) > 0:
        shares = [f"{phase} {seconds / total_s:.0%}" for phase, seconds in run.phase_seconds().items()]
        lines += folded(labelled("time", "")[:-2], [duration(total_s), *shares], width=console.width)
    start = run.start_seconds()
    start_s = start.pop("", 0.0)
    parts = [name for name in sorted(start, key=lambda name: -start[name]) if start[name] >= SMALLEST_PART * start_s]
    if parts and total_s > 0:
        cells = [duration(start_s), *(f"{name} {duration(start[name])}" for name in parts)]
        lines += folded(labelled("start", "")[:-2], cells, width=console.width)
    # Throughput over the whole run, and the most memory that the trainer had on its GPU.
    cost = Benchmark([*run.train.values()])
    rates = {phase: cost.tokens_per_s(phase) for phase in ("generate", "train")}
    if cells := [f"{phase} {rate:,.0f} tokens/s" for phase, rate in rates.items() if rate]:
        lines.append(labelled("throughput", "  ".join(cells)))
    held, reserved = (run.series(f"train/perf/gpu_memory_{name}gb").values for name in ("", "reserved_"))
    if len(held) and len(reserved):
        text = f"peak {held.max():.1f} GB in tensors, {reserved.max():.1f} GB reserved"
        lines.append(labelled("GPU memory", text))
    # What to look at, and what to try; the label stands once.
    label, room = "look at", max(console.width - LABEL_WIDTH, LABEL_WIDTH)
    for text in (text for each in find(run) for text in (each.observation, f"try: {each.advice}")):
        for line in wrap(text, room, break_on_hyphens=False, break_long_words=False):
            lines.append(labelled(label, line))
            label = ""
    say(console, [*lines, labelled("files", run.folder)])


def results_table(run: Run) -> Table:
    """Before training, at the end, and the best with the iteration after which, or in which, it was measured."""
    labels = {f"eval/pass@{k}": f"pass@{k}" for k in run.eval_ks()[:1]}
    labels |= {f"eval/task/{task}/pass@1": f"pass@1 of {task}" for task in run.tasks()[:MAX_TASKS]}
    labels |= {f"eval/pass@{k}": f"pass@{k}" for k in run.eval_ks()[1:]}
    labels |= {"train/reward_mean": "training reward", "train/success_rate": "success rate"}
    rows = []
    for metric, label in labels.items():
        series, is_training = run.series(metric), metric.startswith("train/")
        if not len(series):
            continue
        # Of training, the first and the last iteration; "before" and "after" of an evaluation only where it was one.
        bounds = None if is_training else run.bounds(metric)
        first, last = (
            with_interval(float(series.values[i]), None if bounds is None else (bounds[0][i], bounds[1][i]))
            for i in (0, -1)
        )
        best = int(series.values.argmax())
        best_cell = f"{series.values[best]:.3f} ({series.steps[best] + is_training:.0f})"
        has_first, has_last = series.steps[0] == 0, series.steps[-1] > 0 or is_training
        rows.append([label, first if has_first else "", last if has_last else "", best_cell])
    return Table(["", "before [95%]", "after [95%]", "best (iteration)"], rows)


# A sweep.


def configurations_table(found: Sequence[Configuration]) -> Table:
    """A row for each; runs that the means leave out are in parentheses."""
    rows = [
        [
            each.name,
            " ".join(run.name if run in each.best_known else f"({run.name})" for run in each.runs),
            *_results(each.pass_at_1, each.interval, *map(each.mean, ("best_pass_at_1", "reward", "minutes"))),
        ]
        for each in found
    ]
    return Table(["configuration", "runs", *RESULTS], rows)


def runs_table(runs: Sequence[Run], keys: Sequence[str], values: Mapping[str, Mapping[str, str]]) -> Table:
    """A row for each run, best final pass@1 first; `values`: name of a run -> what it has for these keys."""
    rows = [
        [
            run.name,
            *(values[run.name].get(key, "") for key in keys),
            *_results(run.pass_at_1, run.interval, run.best_pass_at_1, run.reward, run.minutes),
            run.status,
        ]
        for run in sorted(runs, key=by_result)
    ]
    return Table(["run", *keys, *RESULTS, "status"], rows)


def by_result(run: Run) -> tuple[bool, float, float]:
    return run.pass_at_1 is None, -(run.pass_at_1 or 0.0), -(run.reward or 0.0)


def _results(score: float | None, interval: tuple[float, float] | None, *others: float | None) -> list[str]:
    """Cells of RESULTS."""
    best, reward, minutes = others
    took = number(minutes, ".1f" if minutes is None or minutes >= 1 else ".2g")
    return [with_interval(score, interval), number(best), number(reward), took]


# An evaluation of models.


def evaluation_lines(
    models: Mapping[str, str],
    metrics: Mapping[tuple[str, str], Metrics],
    ks: Mapping[str, Sequence[int]],
    comparisons: Mapping[tuple[str, str], PairedResult],
    notes: Sequence[str] = (),
) -> list[str]:
    """A line for each model's name; a row for each set and model with pass@k of the smallest and the largest k; what
    the paired tests say; notes, and a warning where many completions had no room to end. In 80 columns.

    Args:
        models: what each short name stands for; the others are compared with the first.
        metrics: (model, set) -> metrics.
        ks: set -> its k.
    """
    text = StringIO()
    console = Console(file=text, width=80)
    say(console, [f"{letter}  {name}" for letter, name in models.items()])
    # Two values of k beside each other have room.
    sets = list(dict.fromkeys(name for _, name in metrics))
    shown = [f"pass@{k}" for k in sorted({k for name in sets for k in (min(ks[name]), max(ks[name]))})]
    for keys in (shown[i : i + 2] for i in range(0, len(shown), 2)):
        rows = []
        for name in sets:
            label = name  # once, above its models
            for letter in models:
                found = metrics.get((letter, name), {})
                cells = [with_interval(found.get(k), (found.get(f"{k}_low"), found.get(f"{k}_high"))) for k in keys]
                if any(cells):
                    rows.append([label, f"{found['tasks']:.0f}", letter, *cells])
                    label = ""
        say(console, [""])
        Table(["set", "problems", "model", *(f"{key} [95%]" for key in keys)], rows).print(console)
    lines, first = [], next(iter(models))
    for (letter, name), found in comparisons.items():
        ends = f"[{found.low:+.3f}, {found.high:+.3f}]"
        lines.append(f"{letter} - {first} on {name}: {found.difference:+.3f} {ends}, {p_text(found.p_value)}")
        counts = f"better on {found.num_better} and worse on {found.num_worse}"
        lines.append(f"    {counts} of {found.num_problems} problems")
    if comparisons:
        lines = ["", *lines, "this compares models; to compare settings, train several seeds of each"]
    lines += notes
    for (letter, name), found in metrics.items():
        if (share := found["truncated_frac"]) > MANY_CUT:
            lines.append(f"{letter} on {name}: {share:.0%} of the completions were cut; raise eval.max_new_tokens")
    how: dict[str, Any] = {"subsequent_indent": "    ", "break_on_hyphens": False}
    say(console, [part for line in lines for part in wrap(line, 80, **how) or [""]])
    return [line.rstrip() for line in text.getvalue().splitlines()]
