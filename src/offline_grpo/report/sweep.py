"""The table of a sweep, best configuration first; `summary.csv`, `summary.md` and `report.html` beside its runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offline_grpo.report.configurations import Configuration, configurations
from offline_grpo.report.page import save_page
from offline_grpo.report.runs import Run, count, load_runs
from offline_grpo.report.tables import by_result, configurations_table, number, runs_table, say

NUMBERS = ("pass@1", "pass@1_low", "pass@1_high", "best_pass@1", "reward_mean", "minutes")  # of summary.csv


def print_sweep(folders: Sequence[Path], console: Console, out: Path | None = None) -> None:
    """Print the table of all configurations, and write their page to `out` (default: `report.html` in the folder, of
    several in the working directory); of one folder, save tables beside its runs.
    """
    runs = load_runs(folders)
    found = configurations(runs)
    # What the table is ordered by, and what its intervals are over.
    has_seeds = any(len(each.runs) > 1 for each in found)
    order = f"{'mean ' * has_seeds}final {'pass@1' if any(each.counted for each in found) else 'reward'}"
    order += " of each evaluation" * any(each.evaluation != found[0].evaluation for each in found)
    say(console, [f"{count(len(found), 'configuration')}, {count(len(runs), 'run')}, best {order} first"])
    if has_seeds:
        say(console, ["means over seeds with 95% intervals (Student's t: they assume a normal spread)"])
    elif len(found) > 1:
        say(console, ["intervals are over problems; to compare settings, run several seeds: seed=0,1,2"])
    configurations_table(found).print(console, num_folding=2)
    # Runs that did not finish, and whether they count.
    for each in found:
        for run in each.runs:
            note = "" if run in each.best_known else ", not in the mean"
            say(console, [] if run.is_done else [f"run {run.name}: {run.status}{note}"])
    if len(folders) == 1:
        say(console, save_summary(folders[0], runs, found))
    say(console, [save_page(folders, out or (folders[0] if len(folders) == 1 else Path()) / "report.html")])


def save_summary(multirun_dir: Path, runs: Sequence[Run], found: Sequence[Configuration]) -> list[Path]:
    """Write `summary.csv`, a row per run, and `summary.md`, both tables."""
    csv_path, markdown_path = (multirun_dir / name for name in ("summary.csv", "summary.md"))
    # For programs: every override that a run was given.
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    with csv_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "status", *NUMBERS])
        for run in sorted(runs, key=by_result):
            low, high = run.interval or (None, None)
            numbers = (run.pass_at_1, low, high, run.best_pass_at_1, run.reward, run.minutes)
            texts = (number(value, ".6g") for value in numbers)
            writer.writerow([run.name, *(run.overrides.get(key, "") for key in keys), run.status, *texts])
    # For people: those in which runs differ.
    differing = [key for key in keys if len(runs) == 1 or len({run.overrides.get(key) for run in runs}) > 1]
    values = {run.name: run.settings | run.overrides for run in runs}
    tables = (configurations_table(found), runs_table(runs, differing, values))
    markdown_path.write_text("\n".join(table.markdown() for table in tables))
    return [csv_path, markdown_path]
