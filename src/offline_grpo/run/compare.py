"""What `offline_grpo.compare` does: starts a run for each mode, at the same time where there are GPUs for it, and
watches them.

OUT/  MODE/ (the folder of its run)  trainer_MODE.log  pids.txt  comparison.{json,md,png}
      vllm_MODE.log  api_MODE.log  env_MODE.log  vllm_bridge_config_MODE.json  checkpoints_MODE  (links to what the run
                     has of it)
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import psutil

from offline_grpo.disk import require_new
from offline_grpo.engine.launcher import visible
from offline_grpo.engine.ports import choose_port
from offline_grpo.engine.process import ServerProcess, last_line, last_lines
from offline_grpo.errors import ConfigError, GrpoError, StopRequested, require
from offline_grpo.logger import output_console
from offline_grpo.logger.console import SILENCE_S, clock
from offline_grpo.redaction import redacted_text
from offline_grpo.report.comparison import DONE, print_comparison, save_comparison
from offline_grpo.report.tables import say
from offline_grpo.run import config as conf
from offline_grpo.run.config import key_of, quoted
from offline_grpo.run.environment import this_start
from offline_grpo.run.signals import StopSignal

MODES = ("restart", "shared_vllm", "lora_hotswap", "lora_restart")
"""Those of the Atropos trainer, which calls them none, shared_vllm, lora_only and lora_restart."""
RESTARTING = ("restart", "lora_restart")
COMMON = ("eval.enabled=false", "checkpoint.save_interval=0")
"""Words of every run that those of the command line may replace."""
REFUSED = {
    "train.iterations": "steps=N",
    "weight_sync": "modes=A,B",
    "hydra.run.dir": "out=FOLDER",
    "resume": "another comparison, or run_grpo.py for one run",
    "rollouts.url": "nothing: each mode gets an API of its own",
}
"""Keys that the comparison sets itself, and what to write instead."""
LINKS = {
    "vllm_{}.log": "server_*.log",  # the newest
    "api_{}.log": "api.log",
    "env_{}.log": "env_*.log",
    "vllm_bridge_config_{}.json": "vllm_bridge_config.json",
    "checkpoints_{}": "checkpoints",
}
"""What the Atropos scripts call a file, and which one of the run's it is."""
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the command line asks for.

    Args:
        restart_interval: `weight_sync.interval` of the modes that restart the server.
        gpus: of each mode.
        overrides: of every run.
    """

    steps: int
    modes: Sequence[str]
    restart_interval: int
    gpus: int
    out: Path
    overrides: Sequence[str]


def run_comparison(asked: Comparison, *, dry_run: bool) -> None:
    """Run all modes, then print the summaries and the table.

    Raises:
        ConfigError: what cannot be run; nothing has been started.
        GrpoError: some modes failed. The others are in the table.
        StopRequested: a signal came; what was measured is in the table.
    """
    _check(asked)
    commands = {name: _command(name, asked) for name in asked.modes}
    if dry_run:
        for command in commands.values():
            print(shlex.join(command))
        return
    slots = gpu_sets(_num_gpus(), asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(commands, slots, asked.out)
    with StopSignal.listening() as stop:
        try:
            runs.run()
        except StopRequested as signal:
            signal.is_reported = True
            raise
        finally:
            stop.hold("the table")
            runs.stop()
            for name in commands:
                _link(name, asked.out)
            save_comparison(asked.out, _about(asked, slots), runs.states)
            print_comparison(asked.out, output_console())
    failed = [name for name, state in runs.states.items() if state != DONE]
    if failed:
        count = f"{len(failed)} of {len(commands)}"
        raise GrpoError(f"{count} modes failed: {', '.join(failed)}; see trainer_MODE.log in {asked.out}")


class Runs:
    """The runs of the modes, each in a thread that waits for GPUs and then watches its process.

    Args:
        commands: mode -> command line of its run.
        slots: GPUs of the runs at the same time; None is all of the machine.
    """

    def __init__(self, commands: Mapping[str, list[str]], slots: Sequence[list[int] | None], out: Path) -> None:
        self.states = dict.fromkeys(commands, "not started")
        self._commands, self._out = commands, out
        self._free: Queue[list[int] | None] = Queue()
        for gpus in slots:
            self._free.put(gpus)
        self._pool = ThreadPoolExecutor(max_workers=len(slots))
        self._ends = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Start all, and wait until they have ended."""
        for future in [self._pool.submit(self._run, name) for name in self._commands]:
            future.result()

    def stop(self) -> None:
        """End those that still run, and start no other."""
        self._ends.set()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, name: str) -> None:
        """A line when the run starts or ends, and now and then between."""
        gpus, log_path = self._free.get(), self._out / f"trainer_{name}.log"
        env = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": visible(gpus)})}
        process, pid = ServerProcess(self._commands[name], env=env, log_path=log_path), None
        began_s = time.monotonic()
        said_s = began_s - SILENCE_S
        while process.exit_code is None and not self._ends.wait(POLL_S):
            if pid is None and (pid := _pid_of_run(process)) is not None:
                with self._lock, (self._out / "pids.txt").open("a") as file:
                    file.write(f"{name} {pid}\n")
            if time.monotonic() - said_s > SILENCE_S:
                said_s, last = time.monotonic(), last_line(log_path)
                at = "starts" if last.startswith("$ ") else last.strip()
                self._say(name, f"{clock(said_s - began_s)}  {at}")
        code = process.exit_code
        process.stop()
        failure = "stopped" if code is None else f"failed with exit code {code}; {last_lines(log_path, count=1)}"
        self.states[name] = DONE if code == 0 else failure
        self._say(name, self.states[name])
        self._free.put(gpus)

    def _say(self, name: str, text: str) -> None:
        with self._lock:
            say(output_console(), [f"{name:<14}{text}"])


def _check(asked: Comparison) -> None:
    """Raise ConfigError unless the command line makes a run of each mode."""
    known = sorted(path.stem for path in (conf.folder() / "weight_sync").glob("[!_]*.yaml"))
    for name in asked.modes:
        require(name in known, "modes", name, f"no such mode; choose from {', '.join(known)}")
    require(len({*asked.modes}) == len(asked.modes), "modes", ",".join(asked.modes), "a mode is named twice")
    for word in asked.overrides:
        key = key_of(word)
        if key in REFUSED or key.startswith("hydra."):
            raise ConfigError(f"{word}: the comparison sets this itself; use {REFUSED.get(key, 'run_grpo.py')}")
    require_new(asked.out, f"out={asked.out}")
    conf.register()


def _command(name: str, asked: Comparison) -> list[str]:
    """The command line of a mode's run.

    Raises:
        ConfigError: settings that do not fit. Hydra's own errors for what cannot be composed.
    """
    has_lora = name.startswith("lora_")
    words = ["generation=transformers" if name == "in_process" else "generation=vllm_server", *COMMON]
    words += ["model/lora=default"] if has_lora else []
    words += [word for word in asked.overrides if has_lora or not key_of(word).startswith(("model.lora", "model/lora"))]
    words += [f"train.iterations={asked.steps}", f"weight_sync={name}"]
    words += [f"weight_sync.interval={asked.restart_interval}"] if name in RESTARTING else []
    config = conf.typed(conf.composed(words))
    if "url" in config.rollouts:
        words.append(f"rollouts.url=http://127.0.0.1:{choose_port('127.0.0.1', None, key='rollouts.url')}")
    return [sys.executable, "-m", "offline_grpo", *words, f"hydra.run.dir={quoted(asked.out / name)}"]


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def gpu_sets(num_gpus: int, asked: Comparison) -> list[list[int] | None]:
    """The GPUs of modes that run at the same time; one None where there is room for one mode alone, which then sees all
    that there are.

    Raises:
        ConfigError: a mode needs more GPUs than there are.
    """
    fits = not 0 < num_gpus < asked.gpus
    require(fits, "gpus", asked.gpus, f"this machine has {num_gpus}; use gpus={num_gpus}")
    places = min(num_gpus // asked.gpus, len(asked.modes))
    return [list(range(asked.gpus * i, asked.gpus * (i + 1))) for i in range(places)] if places > 1 else [None]


def _pid_of_run(process: ServerProcess) -> int | None:
    """Of the command below the guardian; None if it has ended, or is about to be started."""
    try:
        return next((child.pid for child in psutil.Process(process.pid).children()), None)
    except psutil.NoSuchProcess:
        return None


def _link(name: str, out: Path) -> None:
    for link, pattern in LINKS.items():
        found = max((out / name).glob(pattern), key=lambda path: path.stat().st_mtime, default=None)
        if found is not None:
            (out / link.format(name)).symlink_to(found.relative_to(out))


def _about(asked: Comparison, slots: Sequence[list[int] | None]) -> Mapping[str, Any]:
    """What ran where, for the record."""
    import torch

    start = this_start()
    return {
        "command": start["command"],
        "overrides": " ".join(map(redacted_text, asked.overrides)),
        "restart_interval": asked.restart_interval,
        "at_once": len(slots),
        **{name: start[name] for name in ("time", "git", "host", "platform", "python")},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **{name: start["packages"].get(name) for name in ("torch", "transformers", "vllm")},
    }
