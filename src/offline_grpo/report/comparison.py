"""The table of runs that differ in how weights travel: what `offline_grpo.compare` prints and saves, from the recorded
metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from offline_grpo.disk import write_whole
from offline_grpo.errors import GrpoError
from offline_grpo.logger.benchmark import Benchmark
from offline_grpo.report.history import History, by_number, load_history

FILE = "comparison.json"
DONE = "done"
COMPARED = (
    "The modes share model, task, seeds, prompts per step and steps. They differ in weight_sync and, for lora_*, in what is trained, so "
    "their completions drift apart: compare tokens/s where the numbers of tokens differ. Seconds leave the start out."
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
"""Figure -> how the table calls and writes it."""
LABEL_WIDTH, CELL_WIDTH = 23, 14


@dataclass(frozen=True)
class Arm:
    """One of the runs that are compared. `status` is `DONE`, or why it is not."""

    name: str
    status: str
    history: History
    benchmark: Benchmark

    @property
    def figures(self) -> dict[str, float | None]:
        """The values of MEASURES; None for what was not measured."""
        found, reward = self.benchmark, self.history.series("train", "reward_mean").values
        if not found.num_steps:
            return dict.fromkeys(MEASURES)
        return {
            "num_steps": found.num_steps,
            "seconds_per_step": found.step_s(),
            "seconds": found.total_s(),
            "start_s": self.history.start_seconds().get(""),
            "num_syncs": found.num_syncs,
            "seconds_per_sync": found.total_s("sync") / max(found.num_syncs, 1),
            "sync_s": found.total_s("sync"),
            "data_wait_s_per_step": found.step_s("generate"),
            "data_wait_s": found.total_s("generate"),
            "train_s_per_step": found.step_s("train"),
            "num_completion_tokens": found.num_completion_tokens,
            "generate_tokens_per_s": found.tokens_per_s("generate"),
            "train_tokens_per_s": found.tokens_per_s("train"),
            "tokens_per_s": found.tokens_per_s("iteration"),
            "gpu_peak_gb": found.peak_gb,
            "gpu_mean_gb": found.mean_gb,
            "checkpoint_mb": self._checkpoint_mb(),
            "reward_first": float(reward[0]) if len(reward) else None,
            "reward_last": float(reward[-1]) if len(reward) else None,
        }

    def _checkpoint_mb(self) -> float | None:
        """Of the newest checkpoint's weights: of adapters alone, where only they are trained."""
        found = (self.history.run_dir / "checkpoints").glob("iter_*")
        newest = max(found, key=lambda path: by_number(path.name), default=None)
        return None if newest is None else sum(path.stat().st_size for path in newest.glob("*.safetensors")) / 1e6

    @property
    def cells(self) -> list[str]:
        """The values as the table has them; a dash for what was not measured."""
        return [
            "-" if (value := self.figures[name]) is None else format(value, form)
            for name, (_, form) in MEASURES.items()
        ]


def load_arm(folder: Path, name: str, status: str) -> Arm:
    """The run of a mode, in its folder of the comparison's."""
    history = load_history(folder / name)
    return Arm(name, status, history, Benchmark.of(history.train.values()))


def save_comparison(folder: Path, about: Mapping[str, Any], statuses: Mapping[str, str]) -> None:
    """Write comparison.json. `about`: what ran where; `statuses`: mode -> `DONE`, or why it is not."""
    arms = [load_arm(folder, name, status) for name, status in statuses.items()]
    modes = {arm.name: {"status": arm.status, **arm.figures} for arm in arms}
    write_whole(folder / FILE, json.dumps({"compared": COMPARED, **about, "modes": modes}, indent=1) + "\n")


def print_comparison(folder: Path, console: Console) -> None:
    """Print the summary of each mode and the table, and save table and picture, of a folder that has a comparison.json.

    Raises:
        GrpoError: a file cannot be read.
    """
    from offline_grpo.report.comparison_plot import save_comparison_plot  # matplotlib takes long to import

    try:
        about = json.loads((folder / FILE).read_text())
        statuses = {name: found["status"] for name, found in about["modes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GrpoError(
            f"{folder / FILE}: is no comparison ({error!r}); run the comparison again, or delete the file"
        ) from error
    arms = [load_arm(folder, name, status) for name, status in statuses.items()]
    measured = [arm for arm in arms if arm.history.train]
    lines = [line for arm in measured for line in ("", *arm.benchmark.summary(arm.name))]
    lines += ["", *table(arms, width=console.width), ""]
    lines += [f"{arm.name}: {arm.status}" for arm in arms if arm.status != DONE]
    write_whole(folder / "comparison.md", "".join(_markdown(about, arms)))
    files = [folder / "comparison.md", *([save_comparison_plot(folder, measured)] if measured else [])]
    for line in [*lines, *map(str, files)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def table(arms: Sequence[Arm], *, width: int) -> list[str]:
    """A row for each measure and a column for each mode, as many beside each other as `width` has room for."""
    per_row = max(1, (width - LABEL_WIDTH) // CELL_WIDTH)
    lines: list[str] = []
    for first in range(0, len(arms), per_row):
        some = arms[first : first + per_row]
        columns = [[arm.name[: CELL_WIDTH - 1], *arm.cells] for arm in some]
        labels = ["", *(label for label, _ in MEASURES.values())]
        rows = zip(labels, *columns, strict=True)
        lines += [
            label.ljust(LABEL_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells) for label, *cells in rows
        ]
    return lines


def _markdown(about: Mapping[str, Any], arms: Sequence[Arm]) -> list[str]:
    """The same table, and below it what ran where."""
    header = ["", *(arm.name for arm in arms)]
    rows = [["state", *(arm.status.split(";")[0] for arm in arms)]]
    rows += [
        [label, *cells] for (label, _), *cells in zip(MEASURES.values(), *(arm.cells for arm in arms), strict=True)
    ]
    lines = [header, ["---", *["---:"] * len(arms)], *rows]
    told = [f"- {name}: {value}\n" for name, value in about.items() if name not in ("modes", "compared")]
    return [*(f"| {' | '.join(cells)} |\n" for cells in lines), "\n", COMPARED + "\n\n", *told]
