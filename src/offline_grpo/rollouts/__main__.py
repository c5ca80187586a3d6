"""`python -m offline_grpo.rollouts show|stats|export PATH`: read the rollouts that a run has recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from offline_grpo.disk import require_new
from offline_grpo.errors import ConfigError, GrpoError, ending_with_reader
from offline_grpo.logger import output_console

if TYPE_CHECKING:
    import pyarrow as pa

    from offline_grpo.rollouts.store.reader import Shard


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.rollouts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "show": "what the model saw: best and worst completion of each group; green for advantages above 0, red below",
        "stats": "rewards, lengths, repetitions and how completions ended, by iteration and by length",
        "export": "write them for other tools",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        add = command.add_argument
        add("path", metavar="PATH", type=Path, help="run folder, file of its rollouts/, or folder that datasets saved")
        if name == "export":
            add("out", metavar="OUT", type=Path, help="file, or folder for datasets, to write; a new one")
            add("--format", choices=("jsonl", "datasets", "atropos"), default="jsonl", help="default: jsonl")
        add("--phase", choices=("train", "eval"), default="train", help="default: train")
        add("--iteration", type=int, metavar="N", help="only that one; 1 is the first, 0 the evaluation before it")
        add("--skip-damaged", action="store_true", help="go on without files that cannot be read")
        if name == "show":
            text = "of the newest iteration, or of N (default: 4)"
            add("--groups", type=int, default=4, metavar="N", help=text)
            add("--full", action="store_true", help="whole completions, and every one of a group")
    return parser


def run(arguments: Sequence[str] | None = None) -> None:
    """Read, and print or write."""
    options = parser().parse_args(arguments)

    from offline_grpo.rollouts.store.export import FORMATS
    from offline_grpo.rollouts.store.reader import shards_of
    from offline_grpo.rollouts.store.show import print_stats, show_groups

    # An output that is there already is refused before anything is read.
    number = options.iteration
    if options.command == "export":
        require_new(options.out, f"OUT={options.out}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
    shards = shards_of(options.path, key="PATH", phase=options.phase, iteration=None if number is None else number - 1)
    tables = _tables(shards[::-1] if options.command == "show" else shards, options)
    # `show` needs the newest table alone, so they are read one by one.
    first = next(tables, None)
    if first is None:
        raise ConfigError(f"PATH={options.path}: has no rollouts of phase {options.phase} that were asked for")
    if options.command == "show":
        shard, table = first
        show_groups(output_console(), table, options.groups, full=options.full, decode=shard.decode)
    elif options.command == "stats":
        print_stats(output_console(), (table for _, table in chain([first], tables)))
    else:
        count = FORMATS[options.format](chain([first], tables), options.out)
        print(f"wrote {count:,} {'groups' if options.format == 'atropos' else 'completions'} to {options.out}")


def _tables(shards: Sequence[Shard], options: argparse.Namespace) -> Iterator[tuple[Shard, pa.Table]]:
    """The tables that the options choose, without empty ones."""
    import pyarrow.compute

    for shard in shards:
        try:
            table = shard.table()
        except ConfigError as error:
            if not options.skip_damaged:
                raise ConfigError(f"{error}; --skip-damaged skips this file") from error
            print(f"{error}; left out", file=sys.stderr)
            continue
        chosen = pyarrow.compute.field("phase") == options.phase
        if options.iteration is not None:
            chosen &= pyarrow.compute.field("iteration") == options.iteration - 1
        if (table := table.filter(chosen)).num_rows:
            yield shard, table


def main() -> int:
    """The command line; returns the exit status."""
    try:
        with ending_with_reader():
            run()
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
