"""`python -m offline_grpo.rollouts show|stats|export PATH`: read the rollouts that a run has recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
        "show": "the best and the worst completion of each group, in colours: green for advantages above 0, red below",
        "stats": "rewards, lengths, repetitions and how completions ended, by iteration and by length",
        "export": "write them for other tools",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "path", metavar="PATH", type=Path, help="run folder, file of its rollouts/, or folder that datasets saved"
        )
        if name == "export":
            command.add_argument(
                "out", metavar="OUT", type=Path, help="file, or folder for datasets, to write; a new one"
            )
            command.add_argument(
                "--format", choices=("jsonl", "datasets", "atropos"), default="jsonl", help="default: jsonl"
            )
        command.add_argument("--phase", choices=("train", "eval"), default="train", help="default: train")
        command.add_argument(
            "--iteration", type=int, metavar="N", help="only that one; 1 is the first, 0 the evaluation before it"
        )
        command.add_argument("--skip-damaged", action="store_true", help="go on without files that cannot be read")
        if name == "show":
            command.add_argument(
                "--groups", type=int, default=4, metavar="N", help="of the newest iteration, or of N (default: 4)"
            )
            command.add_argument("--full", action="store_true", help="whole completions, and every one of a group")
    return parser


def run(arguments: Sequence[str] | None = None) -> None:
    """Read, and print or write."""
    options = parser().parse_args(arguments)

    from offline_grpo.rollouts.store.export import FORMATS, check_out
    from offline_grpo.rollouts.store.reader import shards_of
    from offline_grpo.rollouts.store.show import show_groups
    from offline_grpo.rollouts.store.stats import facts_of, print_stats

    if options.iteration is not None and options.iteration < 0:
        raise ConfigError(
            f"--iteration={options.iteration}: must be 0 or more; 1 is the first, 0 the evaluation before it"
        )
    if options.command == "show" and options.groups < 1:
        raise ConfigError(f"--groups={options.groups}: must be 1 or more")
    iteration = None if options.iteration is None else options.iteration - 1
    shards = shards_of(options.path, key="PATH", phase=options.phase, iteration=iteration)
    console = output_console()
    if options.command == "show":
        newest = next(_tables(shards[::-1], options), None)
        if newest is None:
            raise _nothing(options)
        show_groups(console, *newest, options.groups, full=options.full)
    elif options.command == "stats":
        facts = facts_of(table for _, table in _tables(shards, options))
        if not len(facts.rewards):
            raise _nothing(options)
        print_stats(console, facts)
    else:
        check_out(options.out, options.format)
        tables = _tables(shards, options)
        first = next(tables, None)
        if first is None:
            raise _nothing(options)
        try:
            count = FORMATS[options.format]((pair for part in ([first], tables) for pair in part), options.out)
        except OSError as error:
            raise GrpoError(
                f"OUT={options.out}: cannot be written ({error.strerror or error}); name another place"
            ) from error
        print(f"wrote {count:,} {'groups' if options.format == 'atropos' else 'completions'} to {options.out}")


def _tables(shards: Sequence[Shard], options: argparse.Namespace) -> Iterator[tuple[Shard, pa.Table]]:
    """The checked tables that the options choose, without empty ones."""
    import pyarrow.compute

    from offline_grpo.rollouts.store.reader import checked

    for shard, reading in checked(shards, vocab_size=None, context=None):
        try:
            table = reading.result()
        except ConfigError as error:
            if len(shards) == 1:  # without it nothing is left
                raise
            if not options.skip_damaged:
                raise ConfigError(f"{error}; --skip-damaged goes on without this file") from error
            print(f"{error}; left out", file=sys.stderr)
            continue
        chosen = pyarrow.compute.field("phase") == options.phase
        if options.iteration is not None:
            chosen &= pyarrow.compute.field("iteration") == options.iteration - 1
        if (table := table.filter(chosen)).num_rows:
            yield shard, table


def _nothing(options: argparse.Namespace) -> ConfigError:
    which = "" if options.iteration is None else f" of iteration {options.iteration}"
    return ConfigError(f"PATH={options.path}: has no rollouts of phase {options.phase}{which}")


def main() -> int:
    """The command line; returns the exit status."""
    try:
        with ending_with_reader():
            run()
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or 'the output'}: cannot be read or written ({error.strerror})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
