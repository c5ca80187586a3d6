"""`placement.trainer=ray`: starts the training processes on the machines of a Ray cluster, as torchrun does where one
can log in.

Each is the command that was typed, in an actor that holds its GPU. What they print comes out here, and Ctrl-C goes to
all of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from offline_grpo.errors import GrpoError, require
from offline_grpo.run import launch
from offline_grpo.run.config import quoted
from offline_grpo.run.resume import OVERRIDE
from offline_grpo.run.run_dir import release
from offline_grpo.run.signals import StopSignal
from offline_grpo.settings import RunConfig

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
END_S = 15.0
"""After one process has failed, the others may take this long to end by themselves: they wait for it in a collective
operation.
"""
MAX_LINE_BYTES = 2**20
STARTED = "OFFLINE_GRPO_STARTED_BY_RAY"
"""Set for the processes that are started here."""
OF_THIS_PROCESS = ("RAY_", "CUDA_VISIBLE_DEVICES", "HYDRA_FULL_ERROR")
"""Environment variables that are not handed on."""


def is_wanted(placement: Any) -> bool:
    """Whether this process is to start others, and not one that was started so."""
    return placement.trainer == "ray" and STARTED not in os.environ


def train(config: RunConfig, folder: Path) -> None:
    """Train in the folder of a run, until all processes have ended. All machines must see it.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or it has no room for the processes.
        GrpoError: a machine was lost.
        SystemExit: the processes ended with this exit code.
    """
    fix = "starts the training processes itself; leave torchrun or accelerate launch out"
    require(launch.num_processes() == 1, "placement.trainer", "ray", fix)
    fix = "starts the processes of one run; for a sweep on the cluster use hydra/launcher=ray"
    require(HydraConfig.get().mode is not RunMode.MULTIRUN, "placement.trainer", "ray", fix)
    placement = config.placement
    assert placement.address is not None  # see PlacementConfig
    fix = (
        "would end with this command, and the training processes need a cluster that stays; use accelerate launch here"
    )
    require(placement.address != "local", "placement.address", "local", fix)
    from offline_grpo.engine.ray_actor import Room, connect

    is_ours = connect(placement.address, placement.ray_init)
    import ray

    try:
        gpus = 0 if config.model.device == "cpu" else 1
        room = Room(placement.address, "placement.num_trainers", placement.num_trainers, gpus=gpus, strategy="PACK")
        print(f"starting the training processes on the Ray cluster at {placement.address}: {room.machines}", flush=True)
        release(folder)  # the first of the processes writes there
        with closing(room):
            code = _Group([room.hire(index, TrainingActor) for index in range(placement.num_trainers)]).run(
                _commands(folder)
            )
    finally:
        if is_ours:
            ray.shutdown()
    if code != 0:
        sys.exit(code)


def _commands(folder: Path) -> Iterator[list[str]]:
    """The typed command, for one process after the other. The first one gets this folder."""
    typed = [word for word in launch.typed if not word.startswith("hydra.run.dir=")]
    place = max((index for index, word in enumerate(typed, 1) if OVERRIDE.match(word)), default=len(typed))
    own = [f"hydra.run.dir={quoted(folder.absolute())}"]
    script = Path(sys.argv[0]).absolute()
    command = [sys.executable, *(["-m", script.parent.name] if script.name == "__main__.py" else [str(script)])]
    yield [*command, *typed[:place], *own, *typed[place:]]
    while True:
        yield [*command, *typed]


@dataclass(frozen=True)
class Place:
    """Where a training process will run: the machine, its address, and the GPUs that are the process's."""

    node: str
    address: str
    gpus: tuple[str, ...]


class TrainingActor:
    """The Ray actor of a training process: starts it, passes its output on, and ends it with itself."""

    async def place(self) -> Place:
        """Where this is."""
        import ray

        context = ray.get_runtime_context()
        return Place(
            context.get_node_id(), ray.util.get_node_ip_address(), tuple(str(gpu) for gpu in ray.get_gpu_ids())
        )

    async def free_port(self) -> int:
        """A port of this machine on which nobody listens."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return listener.getsockname()[1]

    async def start(
        self, command: Sequence[str], folder: str, typed_in: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        """Start the process with the variables in `env`, those of this machine, and those with which the command was
        typed.
        """
        libc = ctypes.CDLL(None)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env={**typed_in, **os.environ, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # whatever ends the actor
        )

    async def read(self) -> bytes:
        """What the process has printed since, in whole lines; empty once it has ended."""
        output = self._process.stdout
        assert output is not None
        printed = await output.read(MAX_LINE_BYTES)
        return printed if printed[-1:] in (b"", b"\n") else printed + await output.readline()

    async def exit_code(self) -> int:
        """128 + N after signal N."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def interrupt(self, number: int) -> None:
        """Send a signal to the process."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


class _Group:
    """The processes of one run, in the order of their ranks: those of a machine follow each other."""

    def __init__(self, actors: Sequence[Any]) -> None:
        import ray

        places: list[Place] = ray.get([actor.place.remote() for actor in actors])
        machines = list(dict.fromkeys(place.node for place in places))
        order = sorted(range(len(actors)), key=lambda index: machines.index(places[index].node))
        self._actors, self._places = [actors[index] for index in order], [places[index] for index in order]

    def run(self, commands: Iterator[list[str]]) -> int:
        """Start all, each with the next command, and wait for them. Returns 0, or the exit code of the first that
        failed.
        """
        import ray

        port: Any = ray.get(self._actors[0].free_port.remote())
        typed_in = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_PROCESS)}
        about = str(Path.cwd()), typed_in
        started = [
            actor.start.remote(next(commands), *about, self._env(rank, port)) for rank, actor in enumerate(self._actors)
        ]
        ray.get(started)
        with StopSignal.listening() as stop, stop.held("the training processes have saved"):
            return self._wait(stop)

    def _wait(self, stop: StopSignal) -> int:
        import ray

        reading = {actor.read.remote(): rank for rank, actor in enumerate(self._actors)}
        failed, is_told, deadline = 0, False, math.inf
        while reading and time.monotonic() < deadline:
            if stop.number is not None and not is_told:
                is_told = True
                ray.get([actor.interrupt.remote(stop.number) for actor in self._actors])
            for reference in ray.wait(list(reading), timeout=POLL_S)[0]:
                rank = reading.pop(reference)
                code = self._hand_on(rank, reference)
                if code is None:
                    reading[self._actors[rank].read.remote()] = rank
                elif code != 0 and failed == 0:
                    failed, deadline = code, time.monotonic() + END_S
        return failed

    def _hand_on(self, rank: int, reading: Any) -> int | None:
        """Print what a process has printed. Returns the exit code of one that has ended."""
        import ray
        from ray.exceptions import RayActorError

        try:
            printed: Any = ray.get(reading)
            code: Any = None if printed else ray.get(self._actors[rank].exit_code.remote())
        except RayActorError as error:
            where = f"{self._places[rank].address} in the Ray cluster"
            fix = "go on with resume=auto, which takes any number of processes"
            raise GrpoError(f"the machine of training process {rank} was lost, {where}; {fix}") from error
        os.write(1, printed)
        return code

    def _env(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would set, and what the typed command was."""
        place = self._places[rank]
        beside = [index for index, other in enumerate(self._places) if other.node == place.node]
        env = {
            "RANK": rank,
            "WORLD_SIZE": len(self._places),
            "LOCAL_RANK": beside.index(rank),
            "LOCAL_WORLD_SIZE": len(beside),
            "MASTER_ADDR": self._places[0].address,
            "MASTER_PORT": port,
            STARTED: "1",
            "PYTHONUNBUFFERED": "1",
        }
        if place.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for index in beside for gpu in self._places[index].gpus)
        return {name: str(value) for name, value in env.items()}
