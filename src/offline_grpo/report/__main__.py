"""`python -m offline_grpo.report RUN_OR_SWEEP...`: table, picture and page of a run, a sweep or a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from offline_grpo.errors import ConfigError, exit_status
from offline_grpo.logger import output_console
from offline_grpo.logger.atropos import Benchmark, mode_of


def print_report(arguments: Sequence[str] | None) -> None:
    """What the command line asks for. Raises GrpoError where that cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.report",
        description="Print the table of a run or sweep; draw its picture and its page.",
    )
    text = "a run, such as outputs/2026-01-31/12-00-00-000000, or the folder of a --multirun or of a comparison; "
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_OR_SWEEP", help=text + "of several, one page")
    text = "where the page goes; default: report.html in the folder, of several in the working directory"
    parser.add_argument("--out", type=Path, help=text)
    text = "of a run, print the BENCHMARK SUMMARY of the Atropos trainer instead"
    parser.add_argument("--benchmark", action="store_true", help=text)
    options = parser.parse_intermixed_args(arguments)
    from offline_grpo.report import plots, sweep, tables  # matplotlib
    from offline_grpo.report.page import save_page
    from offline_grpo.report.runs import load_run

    out: Path | None = options.out
    folder, console = options.folders[0], output_console()
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out={out}: name a file to write, in a folder that exists")
    # A comparison of modes has a file that says so; a run has metrics or settings; all else are sweeps.
    is_run = (folder / ".hydra").is_dir() or (folder / "metrics").is_dir()
    if len(options.folders) == 1 and (folder / sweep.FILE).is_file():
        sweep.print_comparison(folder, console, out)
    elif len(options.folders) > 1 or not is_run:
        sweep.print_sweep(options.folders, console, out)
    else:
        run = load_run(folder)
        if not run.train and not run.evals:
            raise ConfigError(f"{folder}: has no metrics yet; try again after an iteration")
        if options.benchmark:
            tables.say(console, Benchmark([*run.train.values()]).summary(mode_of(run.config)))
            return
        tables.print_summary(run, console)
        tables.say(console, [tables.labelled("report", plots.save_report(run))])
        tables.say(console, [tables.labelled("page", save_page([folder], out or folder / "report.html"))])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return exit_status(partial(print_report, arguments))


if __name__ == "__main__":
    raise SystemExit(main())
