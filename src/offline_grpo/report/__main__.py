"""`python -m offline_grpo.report RUN_OR_SWEEP...`: table, picture and page of a run, finished or killed, of a sweep, or
of a comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offline_grpo.errors import ConfigError, GrpoError, ending_with_reader
from offline_grpo.logger import output_console
from offline_grpo.logger.benchmark import Benchmark, mode_of
from offline_grpo.report import comparison
from offline_grpo.report.history import load_history
from offline_grpo.report.run_files import read_part
from offline_grpo.report.summary import LABEL_WIDTH, print_summary
from offline_grpo.report.sweep import print_runs, print_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.report",
        description="Print the table of a run or sweep; draw its picture and its page.",
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="RUN_OR_SWEEP",
        help="a run, such as outputs/2026-01-31/12-00-00-000000, or the folder of a --multirun or of a comparison; of several, one page",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="where the page goes; default: report.html in the folder, of several in the working directory",
    )
    parser.add_argument(
        "--benchmark", action="store_true", help="of a run, print the BENCHMARK SUMMARY of the Atropos trainer instead"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        with ending_with_reader():
            _show(options)
    except GrpoError as error:
        return _failed(str(error), error.exit_code)
    except OSError as error:
        return _failed(f"{error.filename or 'the output'}: cannot be read or written ({error.strerror})", 1)
    return 0


def _show(options: argparse.Namespace) -> None:
    folder: Path = options.folders[0]
    out: Path = options.out or (folder if len(options.folders) == 1 else Path()) / "report.html"
    console = output_console()
    if options.out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(
            f"--out={out}: {'is a folder' if out.is_dir() else f'there is no folder {out.parent}'}; name a file to write"
        )
    if len(options.folders) > 1:
        from offline_grpo.report.page_data import load_runs  # matplotlib, which a sweep's table does not need

        print_runs([run.result for run in load_runs(options.folders, damaged=[]).values()], console)
        _page(options.folders, out, console)
    elif (folder / "metrics").is_dir() or (folder / ".hydra" / "overrides.yaml").is_file():
        try:
            _report(folder, console, benchmark=options.benchmark)
        finally:  # the page shows what can be read
            if not options.benchmark:
                _page([folder], out, console)
    elif (folder / comparison.FILE).is_file():
        comparison.print_comparison(folder, console)
    elif (folder / ".hydra" / "config.yaml").is_file():
        raise _no_metrics(folder)
    elif any(folder.rglob(".hydra/overrides.yaml")):
        try:
            print_sweep(folder, console)
        finally:
            _page([folder], out, console)
    else:
        raise ConfigError(f"{folder}: is neither a run (a folder with metrics/) nor a sweep (a folder of runs)")


def _no_metrics(run_dir: Path) -> ConfigError:
    return ConfigError(f"{run_dir}: has no metrics yet, so there is nothing to report; try again after an iteration")


def _failed(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def _page(folders: Sequence[Path], out: Path, console: Console) -> None:
    from offline_grpo.report.page import save_page  # numpy, matplotlib

    console.print(
        "page".ljust(LABEL_WIDTH) + str(save_page(folders, out)), markup=False, highlight=False, soft_wrap=True
    )


def _report(run_dir: Path, console: Console, *, benchmark: bool) -> None:
    from offline_grpo.report.plots import save_report  # matplotlib too

    history = load_history(run_dir)
    if not history.train and not history.evals:
        raise _no_metrics(run_dir)
    if benchmark:
        mode = read_part(run_dir / ".hydra" / "config.yaml", mode_of)
        console.print(
            "\n".join(Benchmark.of(history.train.values()).summary(mode)), markup=False, highlight=False, soft_wrap=True
        )
        return
    print_summary(history, console)
    console.print(
        "report".ljust(LABEL_WIDTH) + str(save_report(history)), markup=False, highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    raise SystemExit(main())
