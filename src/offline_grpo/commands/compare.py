"""What `offline_grpo.compare` does: starts a run for each mode, at the same time where there are GPUs for it, and
watches them.

OUT/  MODE/ (the folder of its run)  trainer_MODE.log  pids.txt  comparison.{json,md,png}
      vllm_MODE.log  api_MODE.log  env_MODE.log  vllm_bridge_config_MODE.json  checkpoints_MODE  (links to what the run
                     has of it)
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from offline_grpo.config import compose as conf
from offline_grpo.config.compose import key_of, quoted, readable
from offline_grpo.disk import require_new
from offline_grpo.engine.launcher import visible
from offline_grpo.engine.ports import choose_port
from offline_grpo.engine.process import ServerProcess, last_lines
from offline_grpo.errors import GrpoError, StopRequested, require
from offline_grpo.history.records import this_start
from offline_grpo.history.signals import StopSignal
from offline_grpo.logger import output_console
from offline_grpo.redaction import redacted_text
from offline_grpo.report.comparison import DONE, print_comparison, save_comparison
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
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("steps", "restart_interval", "gpus"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be 1 or more")
        known = sorted(path.stem for path in (conf.folder() / "weight_sync").glob("[!_]*.yaml"))
        for name in self.names:
            require(name in known, "modes", name, f"no such mode; choose from {', '.join(known)}")
        require(len({*self.names}) == len(self.names), "modes", self.modes, "a mode is named twice")
        for word in self.overrides:
            is_free = key_of(word) not in REFUSED and not word.startswith("hydra.")
            require(is_free, key_of(word), word.partition("=")[2], "the comparison sets this itself; see --help")

    @property
    def names(self) -> list[str]:
        return self.modes.split(",")


HELP = f"""
steps=N             iterations of each mode (default {Comparison.steps})
modes=A,B           options of weight_sync; those that begin with lora_ train adapters (default {Comparison.modes})
restart_interval=N  restart and lora_restart push every N steps (default {Comparison.restart_interval}); others: each
gpus=N              of each mode (default {Comparison.gpus}); modes run at the same time where there are GPUs for it
out=FOLDER          a new folder for everything (default {Comparison.out})
dry_run=true        print the commands, one a line, and end
Every other word goes to every run, as in `run_grpo.py`: experiment=gsm8k_qwen2_5_1_5b. model.lora.KEY=VALUE goes to
those with adapters.
"""


def asked_for(words: Sequence[str]) -> Comparison:
    names = [each.name for each in fields(Comparison) if each.name != "overrides"]
    own = [word for word in words if "=" in word and word.partition("=")[0] in names]
    settings = OmegaConf.merge(OmegaConf.structured(Comparison), OmegaConf.from_dotlist(own))
    settings.overrides = readable([word for word in words if word not in own])
    asked = OmegaConf.to_object(settings)
    assert isinstance(asked, Comparison)
    return asked


def run_comparison(asked: Comparison) -> None:
    """Run all modes, then print the summaries and the table, also where some fail or a signal comes. Raises ConfigError
    before anything is started, GrpoError where modes failed, StopRequested.
    """
    import torch

    out = Path(asked.out.replace("DATE/TIME", datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f"))).absolute()
    require_new(out, f"out={out}")
    conf.register()
    commands = {name: _command(name, asked, out) for name in asked.names}
    if asked.dry_run:
        for command in commands.values():
            print(shlex.join(command))
        return
    slots = gpu_sets(torch.cuda.device_count(), asked)
    out.mkdir(parents=True, exist_ok=True)
    runs = Runs(commands, slots, out)
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
                for link, pattern in LINKS.items():
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
            save_comparison(out, about, runs.states)
            print_comparison(out, output_console())
    failed = [name for name, state in runs.states.items() if state != DONE]
    if failed:
        count = f"{len(failed)} of {len(commands)}"
        raise GrpoError(f"{count} modes failed: {', '.join(failed)}; see trainer_MODE.log in {out}")


class Runs:
    """The runs of the modes. `states` says of each what became of it. `slots`: GPUs of the runs at the same time; None
    is all of the machine.
    """

    def __init__(self, commands: Mapping[str, list[str]], slots: Sequence[list[int] | None], out: Path) -> None:
        self.states = dict.fromkeys(commands, "not started")
        self._waiting, self._free, self._out = dict(commands), [*slots], out
        self._logs = {name: out / f"trainer_{name}.log" for name in commands}
        self._running: dict[str, tuple[ServerProcess, list[int] | None]] = {}
        self._noted = set[str]()

    def run(self) -> None:
        while self._waiting or self._running:
            while self._waiting and self._free:
                name, gpus = next(iter(self._waiting)), self._free.pop(0)
                env = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": visible(gpus)})}
                process = ServerProcess(self._waiting.pop(name), env=env, log_path=self._logs[name])
                self._running[name], self.states[name] = (process, gpus), "stopped"
                self._say(name, f"starts, see {self._logs[name]}")
            time.sleep(POLL_S)
            for name, (process, gpus) in [*self._running.items()]:
                if name not in self._noted and (children := psutil.Process(process.pid).children()):
                    self._noted.add(name)
                    with (self._out / "pids.txt").open("a") as file:  # the command's, which the guardian starts
                        file.write(f"{name} {children[0].pid}\n")
                if (code := process.exit_code) is not None:
                    process.stop()
                    del self._running[name]
                    self._free.append(gpus)
                    failure = f"failed with exit code {code}; {last_lines(self._logs[name], count=1)}"
                    self.states[name] = DONE if code == 0 else failure
                    self._say(name, self.states[name])

    def stop(self) -> None:
        with ThreadPoolExecutor() as pool:
            for process, _ in self._running.values():
                pool.submit(process.stop)

    def _say(self, name: str, text: str) -> None:
        say(output_console(), [f"{name:<14}{text}"])


def _command(name: str, asked: Comparison, out: Path) -> list[str]:
    """The command line of a mode's run. Raises for settings that do not fit."""
    has_lora = name.startswith("lora_")
    words = ["generation=transformers" if name == "in_process" else "generation=vllm_server", *COMMON]
    words += ["model/lora=default"] if has_lora else []
    words += [word for word in asked.overrides if has_lora or not key_of(word).startswith(("model.lora", "model/lora"))]
    words += [f"train.iterations={asked.steps}", f"weight_sync={name}"]
    words += [f"weight_sync.interval={asked.restart_interval}"] if name in ("restart", "lora_restart") else []
    config = conf.typed(conf.composed(words))
    if "url" in config.rollouts:
        words.append(f"rollouts.url=http://127.0.0.1:{choose_port('127.0.0.1', None, key='rollouts.url')}")
    return [sys.executable, "-m", "offline_grpo", *words, f"hydra.run.dir={quoted(out / name)}"]


def gpu_sets(num_gpus: int, asked: Comparison) -> list[list[int] | None]:
    """The GPUs of modes that run at the same time; one None where there is room for one mode alone, which then sees all
    that there are.
    """
    fits = not 0 < num_gpus < asked.gpus
    require(fits, "gpus", asked.gpus, f"this machine has {num_gpus}; use gpus={num_gpus}")
    places = min(num_gpus // asked.gpus, len(asked.names))
    return [list(range(asked.gpus * i, asked.gpus * (i + 1))) for i in range(places)] if places > 1 else [None]
