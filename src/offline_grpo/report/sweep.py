"""Folders of several runs: the table of a sweep, best configuration first, and that of a comparison of how weights
travel. Beside the runs there are `summary.csv` and `.md`, or `comparison.json` and `.md`, and `report.html`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from offline_grpo.disk import write_whole
from offline_grpo.formats import significant
from offline_grpo.logger.atropos import Benchmark
from offline_grpo.report.configurations import configurations
from offline_grpo.report.page import save_page
from offline_grpo.report.runs import Run, by_number, count, load_run, load_runs
from offline_grpo.report.tables import Table, by_result, configurations_table, number, runs_table, say

FILE = "comparison.json"
DONE = "done"
COMPARED = (
    "The modes share model, task, seeds, prompts per step and steps. They differ in weight_sync and, for lora_*, in "
    "what is trained, so their completions drift apart: compare tokens/s where the numbers of tokens differ. Seconds "
    "leave the start out."
)


def _checkpoint_mb(run: Run, _: Benchmark) -> float | None:
    """Of the newest checkpoint the weights alone: of adapters, where only they are trained."""
    newest = max((run.folder / "checkpoints").glob("iter_*"), key=lambda path: by_number(path.name), default=None)
    return None if newest is None else sum(path.stat().st_size for path in newest.glob("*.safetensors")) / 1e6


MEASURES: Mapping[str, tuple[str, str, Callable[[Run, Benchmark], float | None]]] = {
    "num_steps": ("steps", ",.0f", lambda _, cost: len(cost.records)),
    "seconds_per_step": ("seconds per step", ",.2f", lambda _, cost: cost.step_s()),
    "seconds": ("seconds in all", ",.1f", lambda _, cost: cost.total("time/iteration_s")),
    "start_s": ("start, s", ",.1f", lambda run, _: run.start_seconds().get("")),
    "num_syncs": ("syncs", ",.0f", lambda _, cost: cost.num_syncs),
    "seconds_per_sync": ("seconds per sync", ",.3f", lambda _, cost: cost.sync_s()),
    "sync_s": ("syncs in all, s", ",.2f", lambda _, cost: cost.total("time/sync_s")),
    "data_wait_s_per_step": ("data wait per step, s", ",.2f", lambda _, cost: cost.step_s("generate")),
    "data_wait_s": ("data wait in all, s", ",.1f", lambda _, cost: cost.total("time/generate_s")),
    "train_s_per_step": ("training per step, s", ",.2f", lambda _, cost: cost.step_s("train")),
    "num_completion_tokens": ("tokens sampled", ",.0f", lambda _, cost: cost.total("num_completion_tokens")),
    "generate_tokens_per_s": ("sampling, tokens/s", ",.0f", lambda _, cost: cost.tokens_per_s("generate")),
    "train_tokens_per_s": ("training, tokens/s", ",.0f", lambda _, cost: cost.tokens_per_s("train")),
    "tokens_per_s": ("overall, tokens/s", ",.0f", lambda _, cost: cost.tokens_per_s("iteration")),
    "gpu_peak_gb": ("GPU memory, peak GB", ",.1f", lambda _, cost: cost.gpu_gb and cost.gpu_gb[0]),
    "gpu_mean_gb": ("GPU memory, mean GB", ",.1f", lambda _, cost: cost.gpu_gb and cost.gpu_gb[1]),
    "checkpoint_mb": ("checkpoint, MB", ",.1f", _checkpoint_mb),
    "reward_first": ("reward, first step", ".3f", lambda _, cost: cost.records[0].get("reward_mean")),
    "reward_last": ("reward, last step", ".3f", lambda _, cost: cost.records[-1].get("reward_mean")),
}
"""Name in comparison.json -> its name in the table, its format, and the number; None where it was not measured."""
MODES_PER_TABLE = 4  # in 80 columns
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
        csv_path, markdown_path = (folders[0] / name for name in ("summary.csv", "summary.md"))
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
        say(console, [csv_path, markdown_path])
    say(console, [save_page(folders, out or (folders[0] if len(folders) == 1 else Path()) / "report.html")])


# Modes.


def save_comparison(folder: Path, about: Mapping[str, Any], statuses: Mapping[str, str]) -> None:
    """Write comparison.json. `about`: what ran where; `statuses`: mode, which its folder is called, -> `DONE`, or why
    it is not.
    """
    modes: dict[str, dict[str, Any]] = {}
    for mode, status in statuses.items():
        run = load_run(folder / mode)
        cost = Benchmark([*run.train.values()])
        found = {name: measure(run, cost) if cost.records else None for name, (_, _, measure) in MEASURES.items()}
        # A sum of 0.2 and 0.03 is 0.23, and not 0.22999999999999998.
        rounded = {name: None if value is None else significant(value, 10) for name, value in found.items()}
        modes[mode] = {"status": status, **rounded}
    write_whole(folder / FILE, json.dumps({"compared": COMPARED, **about, "modes": modes}, indent=1) + "\n")


def print_comparison(folder: Path, console: Console, out: Path | None = None) -> None:
    """Print the summary of each mode and the table, and save table and page (`out`: see `print_sweep`), of a folder
    with a comparison.json.
    """
    about = json.loads((folder / FILE).read_text())
    modes: dict[str, dict[str, Any]] = about.pop("modes")
    # The block of each mode, which scripts look for.
    measured = [run for run in (load_run(folder / mode, mode) for mode in modes) if run.train]
    for run in measured:
        say(console, ["", *Benchmark([*run.train.values()]).summary(run.name)])
    # All modes, in tables that a terminal has room for; then what failed.
    names = list(modes)
    for start in range(0, len(names), MODES_PER_TABLE):
        say(console, [""])
        comparison_table({name: modes[name] for name in names[start : start + MODES_PER_TABLE]}).print(console)
    failed = [f"{name}: {found['status']}" for name, found in modes.items() if found["status"] != DONE]
    say(console, ["", *failed, folder / "comparison.md"])
    # The same in files.
    facts = [f"- {name}: {value}\n" for name, value in about.items() if name != "compared"]
    write_whole(folder / "comparison.md", "".join([comparison_table(modes).markdown(), f"\n{COMPARED}\n\n", *facts]))
    if measured:
        say(console, [save_page([run.folder for run in measured], out or folder / "report.html")])


def comparison_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each measure and a column for each mode; a dash for what was not measured."""
    rows = [["state", *(found["status"].split(";")[0].split(" with ")[0] for found in modes.values())]]
    for name, (text, form, _) in MEASURES.items():
        rows.append([text, *(number(found.get(name), form, empty="-") for found in modes.values())])
    return Table(["", *modes], rows)
