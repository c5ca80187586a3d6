"""`python -m offline_grpo.model_info MODEL`: its blocks and weights, presets for training parts of it, and which GPUs
it fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain

from offline_grpo import hub
from offline_grpo.run import cli
from offline_grpo.run.model_info import about, about_gpus, look_at


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.model_info", description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL", help="checkpoint, run folder, model folder or Hub id; no weights are read"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    cli.add_trust_option(parser)
    return parser


def run(arguments: Sequence[str] | None = None) -> None:
    """Look and print."""
    options = parser().parse_args(arguments)
    print("offline-grpo: loading ...", file=sys.stderr, flush=True)
    hub.need_model(options.model, "MODEL")  # before imports that take seconds
    info, fits = look_at(options.model, trust=options.trust_remote_code)
    if options.json:
        print(json.dumps(asdict(info) | {"fits": [asdict(fit) for fit in fits]}, indent=2))
        return
    for line in chain(about(info), about_gpus(fits)):
        print(line, flush=True)  # each prediction takes seconds


def main() -> None:
    """The command."""
    cli.run_command(run)


if __name__ == "__main__":
    main()
