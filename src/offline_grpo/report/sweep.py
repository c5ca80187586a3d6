"""The table of a sweep, best run first: `python -m offline_grpo.report.sweep multirun/DATE/TIME`."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo.errors import ConfigError, GrpoError
from offline_grpo.report.history import load_history

NUMBER_COLUMNS = ("pass@1", "pass@1_low", "pass@1_high", "best_pass@1", "reward_mean", "minutes")  # of summary.csv
TEXT_COLUMNS = ("pass@1 [95 %]", "best", "reward", "minutes", "status")  # of summary.md and the terminal


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep: its overrides and its results. A result that was not measured is None."""

    name: str
    overrides: dict[str, str]
    status: str
    final_pass_at_1: float | None
    final_low: float | None
    final_high: float | None
    best_pass_at_1: float | None
    reward: float | None
    minutes: float | None

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The values of NUMBER_COLUMNS."""
        return (self.final_pass_at_1, self.final_low, self.final_high, self.best_pass_at_1, self.reward, self.minutes)

    @property
    def texts(self) -> tuple[str, ...]:
        """The values of TEXT_COLUMNS."""
        has_interval = self.final_low is not None and self.final_high is not None
        interval = f" [{self.final_low:.3f}, {self.final_high:.3f}]" if has_interval else ""
        best, reward = _text(self.best_pass_at_1, ".3f"), _text(self.reward, ".3f")
        return (_text(self.final_pass_at_1, ".3f") + interval, best, reward, _text(self.minutes, ".1f"), self.status)


def sweep_table(multirun_dir: Path) -> list[SweepRun]:
    """Read all runs under `multirun_dir` (folders with `.hydra/overrides.yaml`): best final pass@1 first, unmeasured ones last.

    Raises:
        ConfigError: there is no run.
    """
    run_dirs = sorted(path.parent.parent for path in multirun_dir.rglob(".hydra/overrides.yaml"))
    if not run_dirs:
        raise ConfigError(f"{multirun_dir}: contains no runs (folders with .hydra/overrides.yaml); give the folder of a --multirun")
    runs = [_read_run(run_dir, run_dir.relative_to(multirun_dir).as_posix()) for run_dir in run_dirs]
    return sorted(runs, key=lambda run: (run.final_pass_at_1 is None, -(run.final_pass_at_1 or 0.0)))


def save_summary(multirun_dir: Path, runs: Sequence[SweepRun]) -> tuple[Path, Path]:
    """Write `summary.csv` (full precision, for programs) and `summary.md` (for people) into the sweep's folder."""
    csv_path, markdown_path = multirun_dir / "summary.csv", multirun_dir / "summary.md"
    keys = _overridden_keys(runs)
    with csv_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "status", *NUMBER_COLUMNS])
        writer.writerows([run.name, *(run.overrides.get(key, "") for key in keys), run.status, *run.numbers] for run in runs)
    header, rows = _text_rows(runs)
    lines = [header, ["---"] * len(header), *rows]
    markdown_path.write_text("".join(_markdown_row(line) for line in lines))
    return csv_path, markdown_path


def print_sweep(multirun_dir: Path, console: Console) -> None:
    """Print the sweep's table and save it beside the runs."""
    runs = sweep_table(multirun_dir)
    header, rows = _text_rows(runs)
    table = Table(title=f"{len(runs)} runs, best final pass@1 first", title_justify="left", box=SIMPLE)
    for name in header:
        is_override = name not in ("run", *TEXT_COLUMNS)  # only these cells can be long
        table.add_column(Text(name), overflow="fold", no_wrap=not is_override, min_width=min(len(name), 10))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for path in save_summary(multirun_dir, runs):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _overridden_keys(runs: Sequence[SweepRun]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.overrides))


def _text_rows(runs: Sequence[SweepRun]) -> tuple[list[str], list[list[str]]]:
    """Header and rows. Columns: the run, each override that differs between runs, the results."""
    keys = [key for key in _overridden_keys(runs) if len(runs) == 1 or len({run.overrides.get(key) for run in runs}) > 1]
    rows = [[run.name, *(run.overrides.get(key, "") for key in keys), *run.texts] for run in runs]
    return ["run", *keys, *TEXT_COLUMNS], rows


def _text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |\n"


def _read_run(run_dir: Path, name: str) -> SweepRun:
    history = load_history(run_dir)
    final_low, final_high = (_last(history.series("eval", f"pass@1_{end}").values) for end in ("low", "high"))
    pass_at_1 = history.series("eval", "pass@1").values
    _, seconds = history.phase_seconds()
    return SweepRun(
        name=name,
        overrides=_read_overrides(run_dir),
        status=_status(run_dir, num_done=max(history.train, default=-1) + 1),
        final_pass_at_1=_last(pass_at_1),
        final_low=final_low,
        final_high=final_high,
        best_pass_at_1=float(pass_at_1.max()) if len(pass_at_1) else None,
        reward=_last(history.series("train", "reward_mean").values),
        minutes=sum(float(values.sum()) for values in seconds.values()) / 60 if seconds else None,
    )


def _last(values: Sequence[float] | Any) -> float | None:
    return float(values[-1]) if len(values) else None


def _status(run_dir: Path, *, num_done: int) -> str:
    """`done`, `stopped at 3/10`, or `no metrics` for a run that never finished an iteration."""
    if num_done == 0:
        return "no metrics"
    config = _read_yaml(run_dir / ".hydra" / "config.yaml")
    wanted = config["train"]["iterations"]
    return "done" if num_done >= wanted else f"stopped at {num_done}/{wanted}"


def _read_overrides(run_dir: Path) -> dict[str, str]:
    """`["train.lr=1e-6", "task=sat"]` -> {"train.lr": "1e-6", "task": "sat"}; `~key` deletes and has no value."""
    overrides = _read_yaml(run_dir / ".hydra" / "overrides.yaml") or []
    return {key: value for key, _, value in (str(override).partition("=") for override in overrides)}


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise GrpoError(f"{path}: cannot be read ({error})") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.report.sweep", description="Compare the runs of a sweep.")
    parser.add_argument("multirun_dir", type=Path, help="folder of a --multirun, for example multirun/2026-01-31/12-00-00")
    console = Console()
    try:
        print_sweep(parser.parse_args(arguments).multirun_dir, console)
    except GrpoError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
