"""`python -m offline_grpo.check [--json]`: what this machine can run, on one screen. Exit code 1 if it can run nothing."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from offline_grpo.errors import ending_with_reader
from offline_grpo.run.environment import this_start
from offline_grpo.run.machine import find_gpus, findings, presets

MARKS = {"ok": "ok", "missing": "--", "error": "!!"}
WIDTH = 80


def main(words: Sequence[str] | None = None) -> int:
    """Print the findings. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.check", description="Says what this machine can run, and what is missing."
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with versions, for a bug report")
    options = parser.parse_args(words)
    with ending_with_reader():
        has_errors = _say(as_json=options.json)
    return 1 if has_errors else 0


def _say(*, as_json: bool) -> bool:
    found = list(findings(Path("outputs").absolute()))
    fitting = presets(find_gpus())
    if as_json:
        print(
            json.dumps(
                {"findings": [asdict(one) for one in found], "presets": [p for p, _ in fitting], **this_start()},
                indent=2,
            )
        )
    else:
        for one in found:
            print(_shortened(f"{MARKS[one.state]}  {one.name:<13} {one.text}"))
            if one.state != "ok" and one.fix:
                print(_shortened(f"{'':17} -> {one.fix}"))
        print("This machine fits")
        for command, about in fitting[-2:]:
            for line in textwrap.wrap(f"{command}   # {about}", WIDTH, initial_indent="  ", subsequent_indent="      "):
                print(line)
    return any(one.state == "error" for one in found)


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


if __name__ == "__main__":
    raise SystemExit(main())
