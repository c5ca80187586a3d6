"""`python -m offline_grpo.evaluate MODEL... [GROUP=OPTION] [KEY=VALUE]...`: pass@k of models on held-out problems, and
which is better.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from string import ascii_uppercase

from rich.console import Console

from offline_grpo import hub, progress
from offline_grpo.commands import cli
from offline_grpo.config.compose import key_of, readable
from offline_grpo.disk import require_new
from offline_grpo.errors import ConfigError
from offline_grpo.history.records import ToTerminal
from offline_grpo.logger.console import ConsoleLogger

EPILOG = """
Values with commas make several sets of problems: task=arithmetic,gsm8k. The settings of a checkpoint are those of its
run; what the command line says comes on top. With several models, each is compared with the first one on the same
problems.
"""

OF_TRAINING = ("train", "rollouts", "weight_sync", "checkpoint", "logger", "samples", "resume")
"""Groups that say nothing about an evaluation, but for `train.precision`."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.evaluate", description=__doc__, epilog=EPILOG)
    about = "checkpoint, run, model folder, adapter or Hub id; or a setting"
    parser.add_argument("words", metavar="MODEL|KEY=VALUE", nargs="+", help=about)
    parser.add_argument("--out", type=Path, help="folder for the results (default: outputs/evaluate/DATE/TIME)")
    cli.add_trust_option(parser)
    return parser


def run(arguments: Sequence[str] | None = None) -> None:
    """Evaluate, print the table, and leave results.json and a file of records for each model and set."""
    options = parser().parse_intermixed_args(arguments)
    names = [word for word in options.words if "=" not in word or os.path.exists(word)]
    words = readable([word for word in options.words if word not in names])
    if not 0 < len(names) <= len(ascii_uppercase):
        fix = "name 1 to 26: a checkpoint, a run, a model folder or a Hugging Face id"
        raise ConfigError(f"MODEL: {len(names)} are named; {fix}")
    for word in words:
        key = key_of(word)
        if key in ("eval.backend", "eval.base_url", "eval.weight_sync"):
            fix = "evaluations that are no part of a run ask what generation names, such as generation=vllm_server"
            raise ConfigError(f"{word}: {fix}")
        if key != "train.precision" and re.split(r"[./]", key)[0] in OF_TRAINING:
            raise ConfigError(f"{word}: acts in training alone, and nothing is trained here; leave it out")
    out = options.out or Path("outputs/evaluate") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    require_new(out, f"--out={out}")
    log, console = logging.getLogger("offline_grpo"), Console(stderr=True)
    to_terminal = ToTerminal(console)
    log.setLevel(logging.INFO)
    log.addHandler(to_terminal)
    try:
        log.info("offline-grpo: loading ...")
        for name in names:
            hub.need_model(name, "MODEL")  # before imports that take seconds
        _evaluate(dict(zip(ascii_uppercase, names, strict=False)), words, out, console, trust=options.trust_remote_code)
    finally:
        log.removeHandler(to_terminal)


def _evaluate(names: dict[str, str], words: list[str], out: Path, console: Console, *, trust: bool) -> None:
    from transformers.utils.logging import disable_progress_bar

    from offline_grpo.checkpoint.pretrained import find_model
    from offline_grpo.commands.evaluation import Results, engine_spec, evaluate, evaluation_sets, saved_overrides
    from offline_grpo.eval.table import comparison_lines, results_table, truncation_lines
    from offline_grpo.history.folder import discard_fresh
    from offline_grpo.redaction import redacted

    disable_progress_bar()
    models = {letter: find_model(name, trust_remote_code=trust) for letter, name in names.items()}
    run_folder = next((source.run_folder for source in models.values() if source.run_folder is not None), None)
    base = saved_overrides(run_folder, words)
    if base:
        print(f"settings of {run_folder}, and on top of them the command line's", file=sys.stderr)
    sets = evaluation_sets(base, words)
    spec = engine_spec(sets[0].config, models.values())
    out.mkdir(parents=True, exist_ok=True)
    results = Results()
    display = ConsoleLogger(refresh_per_s=4.0, names="default")
    display.console = console
    try:
        with progress.followed(), closing(display):
            progress.tell([display])
            evaluate(models, sets, spec, out, results)
    finally:
        named = {letter: str(source.checkpoint or source.name) for letter, source in models.items()}
        plain = {each.name: each.plain for each in sets}
        record = {"models": named, "overrides": [*base, *words], "sets": plain, **results.as_plain()}
        if any(out.iterdir()):
            (out / "results.json").write_text(json.dumps(redacted(record), indent=1) + "\n")
        discard_fresh(out)  # if no problem was asked
        lines: list[str] = []
        if results.metrics:
            lines = results_table(named, results.metrics, {each.name: each.config.eval.ks for each in sets})
            if compared := comparison_lines("A", results.comparisons):
                lines += ["", *compared]
            if run_folder is not None and sets[0].config.eval.do_sample:
                lines.append("drawn with other seeds than in the run's evaluation, so the numbers differ a bit")
            lines += truncation_lines(results.metrics)
        if out.exists():
            end = "" if results.is_complete else " (not complete: the problems that were judged are there)"
            print("\n".join([*lines, "", f"files  {out}{end}"]))


def main() -> None:
    cli.run_command(run)


if __name__ == "__main__":
    main()
