"""Runs that differ in how weights travel: table, `comparison.json`, `.md` and page, from the recorded metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
MEASURES: dict[str, tuple[str, str, Callable[[Arm], float | None]]] = {
    "num_steps": ("steps", ",.0f", lambda arm: arm.cost.num_steps),
    "seconds_per_step": ("seconds per step", ",.2f", lambda arm: arm.cost.step_s()),
    "seconds": ("seconds in all", ",.1f", lambda arm: arm.cost.total_s()),
    "start_s": ("start, s", ",.1f", lambda arm: arm.history.start_seconds().get("")),
    "num_syncs": ("syncs", ",.0f", lambda arm: arm.cost.num_syncs),
    "seconds_per_sync": ("seconds per sync", ",.3f", lambda arm: arm.cost.total_s("sync") / max(arm.cost.num_syncs, 1)),
    "sync_s": ("syncs in all, s", ",.2f", lambda arm: arm.cost.total_s("sync")),
    "data_wait_s_per_step": ("data wait per step, s", ",.2f", lambda arm: arm.cost.step_s("generate")),
    "data_wait_s": ("data wait in all, s", ",.1f", lambda arm: arm.cost.total_s("generate")),
    "train_s_per_step": ("training per step, s", ",.2f", lambda arm: arm.cost.step_s("train")),
    "num_completion_tokens": ("tokens sampled", ",.0f", lambda arm: arm.cost.total("num_completion_tokens")),
    "generate_tokens_per_s": ("sampling, tokens/s", ",.0f", lambda arm: arm.cost.tokens_per_s("generate")),
    "train_tokens_per_s": ("training, tokens/s", ",.0f", lambda arm: arm.cost.tokens_per_s("train")),
    "tokens_per_s": ("overall, tokens/s", ",.0f", lambda arm: arm.cost.tokens_per_s("iteration")),
    "gpu_peak_gb": ("GPU memory, peak GB", ",.1f", lambda arm: arm.cost.gpu_gb and arm.cost.gpu_gb[0]),
    "gpu_mean_gb": ("GPU memory, mean GB", ",.1f", lambda arm: arm.cost.gpu_gb and arm.cost.gpu_gb[1]),
    "checkpoint_mb": ("checkpoint, MB", ",.1f", lambda arm: arm.checkpoint_mb()),
    "reward_first": ("reward, first step", ".3f", lambda arm: arm.cost.records[0].get("reward_mean")),
    "reward_last": ("reward, last step", ".3f", lambda arm: arm.cost.records[-1].get("reward_mean")),
}
"""Name in comparison.json -> its name in the table, its format and its value, None where it was not measured."""
MODES_PER_TABLE = 4  # in 80 columns


@dataclass(frozen=True)
class Arm:
    """One of the runs that are compared. `status` is `DONE`, or why it is not."""

    name: str
    status: str
    history: History
    cost: Benchmark

    @property
    def figures(self) -> dict[str, float | None]:
        """The values of MEASURES, without the rounding of sums."""
        values = {name: value(self) if self.cost.num_steps else None for name, (_, _, value) in MEASURES.items()}
        return {name: None if value is None else float(f"{value:.10g}") for name, value in values.items()}

    def checkpoint_mb(self) -> float | None:
        """Of the newest checkpoint's weights: of adapters alone, where only they are trained."""
        found = (self.history.run_dir / "checkpoints").glob("iter_*")
        newest = max(found, key=lambda path: by_number(path.name), default=None)
        return None if newest is None else sum(path.stat().st_size for path in newest.glob("*.safetensors")) / 1e6


def load_arms(folder: Path, statuses: Mapping[str, str]) -> list[Arm]:
    """The runs of the modes. `statuses`: mode, which its folder is called, -> `DONE`, or why it is not."""
    histories = {name: load_history(folder / name) for name in statuses}
    return [
        Arm(name, statuses[name], history, Benchmark([*history.train.values()])) for name, history in histories.items()
    ]


def save_comparison(folder: Path, about: Mapping[str, Any], statuses: Mapping[str, str]) -> None:
    """Write comparison.json. `about`: what ran where; `statuses`: see `load_arms`."""
    modes = {arm.name: {"status": arm.status, **arm.figures} for arm in load_arms(folder, statuses)}
    write_whole(folder / FILE, json.dumps({"compared": COMPARED, **about, "modes": modes}, indent=1) + "\n")


def print_comparison(folder: Path, console: Console) -> None:
    """Print the summary of each mode and the table, and save table and page, of a folder with a comparison.json."""
    about = json.loads((folder / FILE).read_text())
    arms = load_arms(folder, {name: found["status"] for name, found in about.pop("modes").items()})
    # The block of each mode, which scripts look for; then all in tables that a terminal has room for.
    measured = [arm for arm in arms if arm.history.train]
    say(console, [line for arm in measured for line in ("", *arm.cost.summary(arm.name))])
    for start in range(0, len(arms), MODES_PER_TABLE):
        say(console, [""])
        comparison_table(arms[start : start + MODES_PER_TABLE]).print(console)
    # What failed, and the same in files.
    say(console, ["", *(f"{arm.name}: {arm.status}" for arm in arms if arm.status != DONE), folder / "comparison.md"])
    facts = [f"- {name}: {value}\n" for name, value in about.items() if name != "compared"]
    write_whole(folder / "comparison.md", "".join([comparison_table(arms).markdown(), f"\n{COMPARED}\n\n", *facts]))
    if measured:
        say(console, [save_page([arm.history.run_dir for arm in measured], folder / "report.html")])


def comparison_table(arms: Sequence[Arm]) -> Table:
    """A row for each measure and a column for each mode; a dash for what was not measured."""
    figures = [arm.figures for arm in arms]
    rows = [["state", *(arm.status.split(";")[0].split(" with ")[0] for arm in arms)]]
    for name, (text, form, _) in MEASURES.items():
        rows.append([text, *(number(each[name], form, empty="-") for each in figures)])
    return Table(["", *(arm.name for arm in arms)], rows)
