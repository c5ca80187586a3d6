"""Runs that differ in how weights travel: table, `comparison.json`, `.md` and page, from the recorded metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from offline_grpo.disk import write_whole
from offline_grpo.logger.atropos import Benchmark
from offline_grpo.report.history import History, by_number, load_history
from offline_grpo.report.page import save_page
from offline_grpo.report.tables import Table, number, say

FILE = "comparison.json"
DONE = "done"
COMPARED = (
    "The modes share model, task, seeds, prompts per step and steps. They differ in weight_sync and, for lora_*, in "
    "what is trained, so their completions drift apart: compare tokens/s where the numbers of tokens differ. Seconds "
    "leave the start out."
)
MEASURES = {
    "num_steps": ("steps", ",.0f"),
    "seconds_per_step": ("seconds per step", ",.2f"),
    "seconds": ("seconds in all", ",.1f"),
    "start_s": ("start, s", ",.1f"),
    "num_syncs": ("syncs", ",.0f"),
    "seconds_per_sync": ("seconds per sync", ",.3f"),
    "sync_s": ("syncs in all, s", ",.2f"),
    "data_wait_s_per_step": ("data wait per step, s", ",.2f"),
    "data_wait_s": ("data wait in all, s", ",.1f"),
    "train_s_per_step": ("training per step, s", ",.2f"),
    "num_completion_tokens": ("tokens sampled", ",.0f"),
    "generate_tokens_per_s": ("sampling, tokens/s", ",.0f"),
    "train_tokens_per_s": ("training, tokens/s", ",.0f"),
    "tokens_per_s": ("overall, tokens/s", ",.0f"),
    "gpu_peak_gb": ("GPU memory, peak GB", ",.1f"),
    "gpu_mean_gb": ("GPU memory, mean GB", ",.1f"),
    "checkpoint_mb": ("checkpoint, MB", ",.1f"),
    "reward_first": ("reward, first step", ".3f"),
    "reward_last": ("reward, last step", ".3f"),
}
"""Name in comparison.json -> its name in the table, and its format."""
MODES_PER_TABLE = 4  # in 80 columns


def measures(history: History) -> dict[str, float | None]:
    """The values of MEASURES of a run, None where it has no metrics or did not measure one."""
    cost = Benchmark([*history.train.values()])
    if not cost.records:
        return dict.fromkeys(MEASURES)
    # Of the newest checkpoint the weights alone: of adapters, where only they are trained.
    found = (history.run_dir / "checkpoints").glob("iter_*")
    newest = max(found, key=lambda path: by_number(path.name), default=None)
    saved_mb = None if newest is None else sum(path.stat().st_size for path in newest.glob("*.safetensors")) / 1e6
    peak_gb, mean_gb = cost.gpu_gb or (None, None)
    values = {
        "num_steps": cost.num_steps,
        "seconds_per_step": cost.step_s(),
        "seconds": cost.total_s(),
        "start_s": history.start_seconds().get(""),
        "num_syncs": cost.num_syncs,
        "seconds_per_sync": cost.total_s("sync") / max(cost.num_syncs, 1),
        "sync_s": cost.total_s("sync"),
        "data_wait_s_per_step": cost.step_s("generate"),
        "data_wait_s": cost.total_s("generate"),
        "train_s_per_step": cost.step_s("train"),
        "num_completion_tokens": cost.total("num_completion_tokens"),
        "generate_tokens_per_s": cost.tokens_per_s("generate"),
        "train_tokens_per_s": cost.tokens_per_s("train"),
        "tokens_per_s": cost.tokens_per_s("iteration"),
        "gpu_peak_gb": peak_gb,
        "gpu_mean_gb": mean_gb,
        "checkpoint_mb": saved_mb,
        "reward_first": cost.records[0].get("reward_mean"),
        "reward_last": cost.records[-1].get("reward_mean"),
    }
    # A sum of 0.2 and 0.03 is 0.23, and not 0.22999999999999998.
    return {name: None if value is None else float(f"{value:.10g}") for name, value in values.items()}


def save_comparison(folder: Path, about: Mapping[str, Any], statuses: Mapping[str, str]) -> None:
    """Write comparison.json. `about`: what ran where; `statuses`: mode, which its folder is called, -> `DONE`, or why
    it is not.
    """
    modes = {name: {"status": status, **measures(load_history(folder / name))} for name, status in statuses.items()}
    write_whole(folder / FILE, json.dumps({"compared": COMPARED, **about, "modes": modes}, indent=1) + "\n")


def print_comparison(folder: Path, console: Console) -> None:
    """Print the summary of each mode and the table, and save table and page, of a folder with a comparison.json."""
    about = json.loads((folder / FILE).read_text())
    modes: dict[str, dict[str, Any]] = about.pop("modes")
    # The block of each mode, which scripts look for.
    histories = (load_history(folder / name) for name in modes)
    measured = [history for history in histories if history.train]
    for history in measured:
        say(console, ["", *Benchmark([*history.train.values()]).summary(history.run_dir.name)])
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
        say(console, [save_page([history.run_dir for history in measured], folder / "report.html")])


def comparison_table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each measure and a column for each mode; a dash for what was not measured."""
    rows = [["state", *(found["status"].split(";")[0].split(" with ")[0] for found in modes.values())]]
    for name, (text, form) in MEASURES.items():
        rows.append([text, *(number(found.get(name), form, empty="-") for found in modes.values())])
    return Table(["", *modes], rows)
