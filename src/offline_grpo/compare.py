"""`python -m offline_grpo.compare [steps=50] [modes=A,B,...] [KEY=VALUE]...`: weight-sync modes on the same work, side
by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from offline_grpo.errors import ConfigError
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
    for word in words:
        if word in OWN:
            raise ConfigError(f"{word}: needs a value, such as {word}={OWN[word]}")
    typed = dict(word.split("=", 1) for word in words if word.split("=")[0] in OWN)
    own = OWN | typed
    if own["dry_run"] not in ("true", "false"):
        raise ConfigError(f"dry_run={own['dry_run']}: must be true or false")
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    run_comparison(
        Comparison(
            steps=_count("steps", own),
            modes=own["modes"].split(","),
            restart_interval=_count("restart_interval", own),
            gpus=_count("gpus", own),
            out=Path(typed.get("out", f"outputs/compare/{now}")).absolute(),
            overrides=[word for word in words if word.split("=")[0] not in OWN],
        ),
        dry_run=own["dry_run"] == "true",
    )


def _count(name: str, own: dict[str, str]) -> int:
    if not own[name].isdecimal() or int(own[name]) < 1:
        raise ConfigError(f"{name}={own[name]}: must be a whole number from 1")
    return int(own[name])


def main() -> None:
    """The command."""
    cli.run_command(run)


if __name__ == "__main__":
    main()
