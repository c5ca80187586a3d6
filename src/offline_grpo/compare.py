"""`python -m offline_grpo.compare [steps=50] [modes=A,B] [KEY=VALUE]...`: weight-sync modes side by side.

A run for each option of weight_sync, with all else equal, and a table of what each one costs.

OUT/  MODE/ (the folder of its run)  trainer_MODE.log  pids.txt  comparison.{json,md}  report.html
      vllm_MODE.log  api_MODE.log  env_MODE.log  vllm_bridge_config_MODE.json  checkpoints_MODE  (links into MODE/)
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path

import psutil

from offline_grpo.commands import cli
from offline_grpo.config import compose as conf
from offline_grpo.config.compose import key_of, quoted, readable
from offline_grpo.disk import require_new
from offline_grpo.engine.http import choose_port
from offline_grpo.engine.spawn import Child, last_lines, visible
from offline_grpo.errors import ConfigError, GrpoError, StopRequested, how_ended
from offline_grpo.history.records import this_start
from offline_grpo.history.signals import StopSignal
from offline_grpo.logger import output_console
from offline_grpo.redaction import redacted_text
from offline_grpo.report.sweep import DONE, print_comparison, save_comparison
from offline_grpo.report.tables import say

COMMON = ("eval.enabled=false", "checkpoint.save_interval=0")
"""Words of every run that those of the command line may replace."""
REFUSED = ("train.iterations", "weight_sync", "resume", "rollouts.url")
"""Keys that the comparison sets itself, as all of Hydra's."""
LINKS = {
    "vllm_{}.log": "server_*.log",  # the newest
    "api_{}.log": "api.log",
    "env_{}.log": "env_*.log",
    "vllm_bridge_config_{}.json": "vllm_bridge_config.json",
    "checkpoints_{}": "checkpoints",
}
"""What the Atropos scripts call a file, and which one of the run's it is."""
COMPUTES = re.compile("torch|transformers|vllm.*")  # vLLM for CPUs has another name
POLL_S = 0.5


@dataclass
class Comparison:
    """The words that are the command's own; `overrides` go to every run."""

    steps: int = 50
    modes: str = "restart,shared_vllm,lora_hotswap,lora_restart"  # the Atropos trainer has these four
    restart_interval: int = 3
    gpus: int = 1
    out: str = "outputs/compare/DATE/TIME"
    dry_run: bool = False
    overrides: Sequence[str] = ()


HELP = f"""
steps=N             iterations of each mode (default {Comparison.steps})
modes=A,B           options of weight_sync; those that begin with lora_ train
                    adapters (default
                    {Comparison.modes})
restart_interval=N  restart and lora_restart push every N steps (default {Comparison.restart_interval});
                    others: each
gpus=N              of each mode (default {Comparison.gpus}); modes run at the same time where
                    there are GPUs for it
out=FOLDER          a new folder for everything (default
                    {Comparison.out})
dry_run=true        print the commands, one a line, and end
Every other word goes to every run, as on its own command line:
experiment=gsm8k_qwen2_5_1_5b. model.lora.KEY=VALUE goes to those with adapters.
"""


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.compare",
        description=(__doc__ or "").partition("\n")[0],
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="see below")

    # Words of its own, and overrides for every run.
    asked, others = Comparison(), list[str]()
    for word in parser.parse_args(arguments).words:
        key, _, value = word.partition("=")
        if key in ("modes", "out"):
            setattr(asked, key, value)
        elif key == "dry_run":
            if value.lower() not in ("true", "false"):
                raise ConfigError(key, value, "must be true or false")
            asked.dry_run = value.lower() == "true"
        elif key in ("steps", "restart_interval", "gpus"):
            if not value.isdecimal() or int(value) == 0:
                raise ConfigError(key, value, "must be 1 or more")
            setattr(asked, key, int(value))
        else:
            others.append(word)
    asked.overrides = readable(others)
    for word in asked.overrides:
        if key_of(word) in REFUSED or (word.startswith("hydra.") and key_of(word) != "hydra.searchpath"):
            raise ConfigError(key_of(word), word.partition("=")[2], "the comparison sets this itself; see --help")
    run_comparison(asked)


def run_comparison(asked: Comparison) -> None:
    """Run all modes, then print the summaries and the table, also where some fail or a signal comes. Raises ConfigError
    before anything is started, GrpoError where modes failed, StopRequested.
    """
    import torch

    # What will run is known, and fits, before anything is started.
    out = Path(asked.out.replace("DATE/TIME", datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f"))).absolute()
    require_new(out, f"out={out}")
    conf.register()
    names, known = asked.modes.split(","), conf.groups(conf.folders(asked.overrides))["weight_sync"]
    for name in names:
        if name not in known:
            raise ConfigError("modes", name, f"no such mode; choose from {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError("modes", asked.modes, "a mode is named twice")
    commands = {name: command_of(name, asked, out) for name in names}
    if asked.dry_run:
        print("\n".join(map(shlex.join, commands.values())))
        return

    # The GPUs of modes that run at the same time; where there is room for one mode alone, it sees all that there are.
    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < asked.gpus:
        raise ConfigError("gpus", asked.gpus, f"this machine has {num_gpus}; use gpus={num_gpus}")
    slots: list[list[int] | None] = [None]
    if (places := min(num_gpus // asked.gpus, len(names))) > 1:
        slots = [list(range(asked.gpus * i, asked.gpus * (i + 1))) for i in range(places)]

    out.mkdir(parents=True, exist_ok=True)
    states = dict.fromkeys(commands, "not started")
    with StopSignal.listening() as stop:
        try:
            run_modes(commands, slots, out, states)
        except StopRequested as signal:
            signal.is_reported = True
            raise
        finally:  # the table has what was measured so far
            stop.hold("the table")
            for name, (link, pattern) in product(commands, LINKS.items()):
                if found := sorted((out / name).glob(pattern), key=lambda path: path.stat().st_mtime):
                    (out / link.format(name)).symlink_to(found[-1].relative_to(out))
            start = this_start()
            about = {
                "overrides": " ".join(map(redacted_text, asked.overrides)),
                "restart_interval": asked.restart_interval,
                "at_once": len(slots),
                **{name: start[name] for name in ("command", "time", "git", "host", "platform", "python")},
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                **{name: start["packages"][name] for name in start["packages"] if COMPUTES.fullmatch(name)},
            }
            save_comparison(out, about, states)
            print_comparison(out, output_console())
    failed = [name for name, state in states.items() if state != DONE]
    if failed:
        count = f"{len(failed)} of {len(commands)}"
        raise GrpoError(f"{count} modes failed: {', '.join(failed)}; see trainer_MODE.log in {out}")


def command_of(name: str, asked: Comparison, out: Path) -> list[str]:
    """The command line of a mode's run. Raises for settings that do not fit."""
    has_lora = name.startswith("lora_")
    words = ["generation=transformers" if name == "in_process" else "generation=vllm_server", *COMMON]
    words += ["model/lora=default"] if has_lora else []
    words += [word for word in asked.overrides if has_lora or not key_of(word).startswith(("model.lora", "model/lora"))]
    words += [f"train.iterations={asked.steps}", f"weight_sync={name}"]
    words += [f"weight_sync.interval={asked.restart_interval}"] if name in ("restart", "lora_restart") else []
    config = conf.typed(conf.composed(words))
    if config.source.has_environments:
        words.append(f"rollouts.url=http://127.0.0.1:{choose_port('127.0.0.1', None, key='rollouts.url')}")
    return [sys.executable, "-m", "offline_grpo", *words, f"hydra.run.dir={quoted(out / name)}"]


def run_modes(
    commands: Mapping[str, list[str]], slots: Sequence[list[int] | None], out: Path, states: dict[str, str]
) -> None:
    """Run the commands to their ends, as many at a time as there are slots: GPUs, or None for all of the machine.
    `states` gets what becomes of each. Whatever ends this, none goes on.
    """
    waiting, free = dict(commands), [*slots]
    running: dict[str, tuple[Child, list[int] | None]] = {}
    noted = set[str]()
    try:
        while waiting or running:
            # Where GPUs are free, the next mode starts.
            while waiting and free:
                name, gpus = next(iter(waiting)), free.pop(0)
                env = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": visible(gpus)})}
                process = Child(waiting.pop(name), env=env, log_path=out / f"trainer_{name}.log")
                running[name], states[name] = (process, gpus), "stopped"
                say(output_console(), [f"{name:<14}starts, see {process.log_path}"])
            time.sleep(POLL_S)
            # Those that have ended give theirs back.
            for name, (process, gpus) in [*running.items()]:
                if name not in noted and (children := psutil.Process(process.pid).children()):
                    noted.add(name)
                    with (out / "pids.txt").open("a") as file:  # the command's, which the guardian starts
                        file.write(f"{name} {children[0].pid}\n")
                if (code := process.exit_code) is not None:
                    process.stop()
                    del running[name]
                    free.append(gpus)
                    failure = f"failed with {how_ended(code)}; {last_lines(process.log_path, count=1)}"
                    states[name] = DONE if code == 0 else failure
                    say(output_console(), [f"{name:<14}{states[name]}"])
    finally:
        with ThreadPoolExecutor() as pool:
            for process, _ in running.values():
                pool.submit(process.stop)


if __name__ == "__main__":
    cli.run_command(run)
