"""`python -m offline_grpo.report RUN`: the report and the table of a run, finished or killed, or the table of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offline_grpo.errors import ConfigError, GrpoError
from offline_grpo.report.history import load_history
from offline_grpo.report.sweep import print_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.report", description="Draw report.png of a run and print its table.")
    parser.add_argument("folder", type=Path, help="a run, such as outputs/2026-01-31/12-00-00-000000, or the folder of a --multirun")
    folder = parser.parse_args(arguments).folder
    console = Console()
    try:
        if (folder / "metrics").is_dir():
            _report(folder, console)
        elif any(folder.rglob(".hydra/overrides.yaml")):
            print_sweep(folder, console)
        else:
            raise ConfigError(f"{folder}: is neither a run (a folder with metrics/) nor a sweep (a folder of runs)")
    except GrpoError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    return 0


def _report(run_dir: Path, console: Console) -> None:
    from offline_grpo.report.plots import save_report  # matplotlib, which a sweep's table does not need
    from offline_grpo.report.summary import print_summary

    history = load_history(run_dir)
    if not history.train and not history.evals:
        raise ConfigError(f"{run_dir}: has no metrics yet, so there is nothing to report")
    save_report(history)
    print_summary(history, console)


if __name__ == "__main__":
    raise SystemExit(main())
