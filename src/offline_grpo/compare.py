"""`python -m offline_grpo.compare [steps=50] [modes=A,B] [KEY=VALUE]...`: weight-sync modes side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from offline_grpo.commands import cli
from offline_grpo.commands.compare import HELP, asked_for, run_comparison


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.compare",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="see below")
    run_comparison(asked_for(parser.parse_args(arguments).words))


if __name__ == "__main__":
    cli.run_command(run)
