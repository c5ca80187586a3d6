"""`python -m offline_grpo.compare [steps=50] [modes=A,B] [KEY=VALUE]...`: weight-sync modes side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from offline_grpo.errors import require
from offline_grpo.run import cli
from offline_grpo.run.compare import MODES, Comparison, run_comparison

OWN = {
    "steps": "50",
    "modes": ",".join(MODES),
    "restart_interval": "3",
    "gpus": "1",
    "out": "outputs/compare/DATE/TIME",
    "dry_run": "false",
}
EPILOG = f"""
steps=N             iterations of each mode (default {OWN["steps"]})
modes=A,B           options of weight_sync; those that begin with lora_ train adapters (default {OWN["modes"]})
restart_interval=N  restart and lora_restart push every N steps (default {OWN["restart_interval"]}); others each step
gpus=N              of each mode (default {OWN["gpus"]}); modes run at the same time where there are GPUs for it
out=FOLDER          a new folder for everything (default {OWN["out"]})
dry_run=true        print the commands, one a line, and end
Every other word goes to every run, as in `run_grpo.py`: experiment=gsm8k_qwen2_5_1_5b. model.lora.KEY=VALUE goes to
those with adapters.
"""


def run(arguments: Sequence[str] | None = None) -> None:
    """Read the words, run the modes, print the summaries and the table."""
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.compare",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="see below")
    words: list[str] = parser.parse_args(arguments).words
    typed = dict(word.split("=", 1) for word in words if word.partition("=")[0] in OWN and "=" in word)
    own = OWN | typed
    for name in ("steps", "restart_interval", "gpus"):
        require(own[name].isdecimal() and int(own[name]) > 0, name, own[name], "must be a whole number from 1")
    require(own["dry_run"] in ("true", "false"), "dry_run", own["dry_run"], "must be true or false")
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    run_comparison(
        Comparison(
            steps=int(own["steps"]),
            modes=own["modes"].split(","),
            restart_interval=int(own["restart_interval"]),
            gpus=int(own["gpus"]),
            out=Path(typed.get("out", f"outputs/compare/{now}")).absolute(),
            overrides=[word for word in words if word.partition("=")[0] not in typed],
        ),
        dry_run=own["dry_run"] == "true",
    )


def main() -> None:
    """The command."""
    cli.run_command(run)


if __name__ == "__main__":
    main()
