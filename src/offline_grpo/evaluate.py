"""`python -m offline_grpo.evaluate MODEL... [GROUP=OPTION] [KEY=VALUE]...`: pass@k of models on held-out problems, and
which is better.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from string import ascii_uppercase

from rich.console import Console

from offline_grpo import hub
from offline_grpo.commands import cli
from offline_grpo.config.compose import key_of, readable
from offline_grpo.disk import require_new
from offline_grpo.errors import ConfigError
from offline_grpo.history.records import told_on

EPILOG = """
Values with commas make several sets of problems: task=arithmetic,gsm8k. The settings of a checkpoint are those of its
run; what the command line says comes on top. With several models, each is compared with the first one on the same
problems.
"""

OF_TRAINING = ("train", "rollouts", "weight_sync", "checkpoint", "logger", "samples", "resume", "hydra")
"""Groups that say nothing about an evaluation, but for `train.precision` and `hydra.searchpath`."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Evaluate, print the table, and leave results.json and a file of records for each model and set."""
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.evaluate", description=__doc__, epilog=EPILOG)
    about = "checkpoint, run, model folder, adapter or Hub id; or a setting"
    parser.add_argument("words", metavar="MODEL|KEY=VALUE", nargs="+", help=about)
    parser.add_argument("--out", type=Path, help="folder for the results (default: outputs/evaluate/DATE/TIME)")
    cli.add_trust_option(parser)
    options = parser.parse_intermixed_args(arguments)

    # A word with = is a setting, unless a file has that name. Settings that could have no effect are refused.
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
        if key not in ("train.precision", "hydra.searchpath") and re.split(r"[./]", key)[0] in OF_TRAINING:
            raise ConfigError(f"{word}: acts in training alone, and nothing is trained here; leave it out")
    out = options.out or Path("outputs/evaluate") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    require_new(out, f"--out={out}")
    console = Console(stderr=True)
    with told_on(console) as log:
        log.info("offline-grpo: loading ...")
        for name in names:
            hub.need_model(name, "MODEL")  # before imports that take seconds
        from offline_grpo.commands.evaluation import evaluate_and_print

        models = dict(zip(ascii_uppercase, names, strict=False))
        evaluate_and_print(models, words, out, console, trust=options.trust_remote_code)


def main() -> None:
    cli.run_command(run)


if __name__ == "__main__":
    main()
