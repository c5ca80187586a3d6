"""The table and the picture of a sweep, best configuration first."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo.errors import ConfigError
from offline_grpo.logger import print_table
from offline_grpo.report.configurations import Configuration, configurations, short_overrides
from offline_grpo.report.history import by_number, count
from offline_grpo.report.summary import LABEL_WIDTH
from offline_grpo.report.sweep_run import NUMBER_COLUMNS, SweepRun, read_or_say

CONFIGURATION_COLUMNS = ("configuration", "runs", "pass@1 [95%]", "best", "reward", "minutes")
RUN_COLUMNS = ("pass@1 [95%]", "best", "reward", "minutes", "status")
ALIKE = "all alike"
GAP = 2
RUNS_WIDTH = 7  # then the list of runs folds
LEAST_NAME_WIDTH = 18  # of the column `configuration`


def sweep_table(multirun_dir: Path) -> list[SweepRun]:
    """Read all runs under `multirun_dir` (folders with `.hydra/overrides.yaml`): best final pass@1 first, unmeasured
    ones last.

    Raises:
        ConfigError: there is no run.
    """
    run_dirs = sorted(path.parent.parent for path in multirun_dir.rglob(".hydra/overrides.yaml"))
    if not run_dirs:
        raise ConfigError(
            f"{multirun_dir}: contains no runs (folders with .hydra/overrides.yaml); give the folder of a --multirun"
        )
    runs = [read_or_say(run_dir, run_dir.relative_to(multirun_dir).as_posix()) for run_dir in run_dirs]
    return sorted(
        runs, key=lambda run: (run.final_pass_at_1 is None, -(run.final_pass_at_1 or 0.0), -(run.reward or 0.0))
    )


def print_sweep(multirun_dir: Path, console: Console) -> None:
    """Print the sweep's table, and save tables and picture beside the runs."""
    runs = sweep_table(multirun_dir)
    found = configurations(runs)
    saved = save_summary(multirun_dir, runs, found)
    _print_table(found, console)
    left_out = {run.name for each in found for run in each.left_out}
    unfinished = [
        f"run {run.name}: {run.status}{', not in the mean' if run.name in left_out else ''}"
        for run in sorted(runs, key=lambda run: by_number(run.name))
        if not run.is_done
    ]
    for line in [*unfinished, *map(str, saved)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_runs(runs: Sequence[SweepRun], console: Console) -> None:
    """Print the table of runs of any folders. Their names, which are paths, are told below it."""
    numbered = [replace(run, name=str(number)) for number, run in enumerate(runs)]
    _print_table(configurations(numbered), console)
    for number, run in enumerate(runs):
        status = "" if run.is_done else f"  ({run.status})"
        console.print(
            f"run {number}".ljust(LABEL_WIDTH) + run.name + status, markup=False, highlight=False, soft_wrap=True
        )


def _print_table(found: Sequence[Configuration], console: Console) -> None:
    columns = list(zip(CONFIGURATION_COLUMNS, *configuration_rows(found), strict=True))
    names, *rows = zip(*(column for column in columns if any(column[1:])), strict=True)  # without what was not measured
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    widths[1] = min(widths[1], RUNS_WIDTH)
    others = sum(widths[1:]) + GAP * (len(widths) - 1)
    room = max(console.width - others, LEAST_NAME_WIDTH)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for name in names:
        folds, longest = name in ("configuration", "runs"), RUNS_WIDTH if name == "runs" else None
        table.add_column(Text(name), overflow="fold", no_wrap=not folds, max_width=longest)
    for overrides, row in zip(short_overrides(found), rows, strict=True):
        table.add_row(Text(_folded(overrides, room)), *(Text(cell) for cell in row[1:]))
    several, num_runs = any(len(each.runs) > 1 for each in found), sum(len(each.runs) for each in found)
    order = f"{'mean ' if several else ''}final {'pass@1' if any(each.counted for each in found) else 'reward'}"
    lines = [
        f"{count(len(found), 'configuration')}, {count(num_runs, 'run')}, best {order} first",
        *(["means over runs that differ in the seed alone, with 95% intervals"] if several else []),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_table(console, table, least_width=others + room)


def save_summary(multirun_dir: Path, runs: Sequence[SweepRun], found: Sequence[Configuration]) -> list[Path]:
    """Write `summary.csv` (a row per run, in full precision), `summary.md` (both tables) and, if pass@1 was measured,
    `sweep.png`.
    """
    from offline_grpo.report.sweep_plot import save_sweep_plot  # matplotlib takes long to import

    csv_path, markdown_path = multirun_dir / "summary.csv", multirun_dir / "summary.md"
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    with csv_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "status", *NUMBER_COLUMNS])
        writer.writerows(
            [run.name, *(run.overrides.get(key, "") for key in keys), run.status, *run.numbers] for run in runs
        )
    lines = [*_markdown(CONFIGURATION_COLUMNS, configuration_rows(found)), "\n", *_markdown(*_run_rows(runs))]
    markdown_path.write_text("".join(lines))
    picture = save_sweep_plot(multirun_dir, found)
    return [csv_path, markdown_path, *([picture] if picture is not None else [])]


def _folded(overrides: Mapping[str, str], width: int) -> str:
    """An override per line; the value on a line of its own where the two are too wide."""
    pairs = [(f"{name}=", value) for name, value in overrides.items()]
    return (
        "\n".join(name + value if len(name + value) <= width else f"{name}\n  {value}" for name, value in pairs)
        or ALIKE
    )


def configuration_rows(found: Sequence[Configuration]) -> list[list[str]]:
    """Cells of CONFIGURATION_COLUMNS; runs that the means leave out are in parentheses."""
    return [
        [
            ", ".join(f"{key}={value}" for key, value in each.overrides.items()) or ALIKE,
            " ".join(f"({run.name})" if run in each.left_out else run.name for run in each.runs),
            _interval(each.pass_at_1, each.low, each.high),
            _text(each.mean("best_pass_at_1"), ".3f"),
            _text(each.mean("reward"), ".3f"),
            _minutes(each.mean("minutes")),
        ]
        for each in found
    ]


def _run_rows(runs: Sequence[SweepRun]) -> tuple[list[str], list[list[str]]]:
    """Header and rows. Columns: the run, each override that differs between runs, the results."""
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    keys = [key for key in keys if len(runs) == 1 or len({run.overrides.get(key) for run in runs}) > 1]
    rows = [[run.name, *(run.overrides.get(key, "") for key in keys), *result_cells(run)] for run in runs]
    return ["run", *keys, *RUN_COLUMNS], rows


def result_cells(run: SweepRun) -> list[str]:
    """Cells of RUN_COLUMNS; the interval is over the run's problems."""
    best, reward, minutes = _text(run.best_pass_at_1, ".3f"), _text(run.reward, ".3f"), _minutes(run.minutes)
    return [_interval(run.final_pass_at_1, run.final_low, run.final_high), best, reward, minutes, run.status]


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return _text(value, ".3f") + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def _text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _minutes(number: float | None) -> str:
    return _text(number, ".1f" if number is None or number >= 1 else ".2g")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return [f"| {' | '.join(cells)} |\n" for cells in escaped]
