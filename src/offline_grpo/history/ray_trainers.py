"""`placement.trainer=ray`: starts the training processes on the machines of a Ray cluster. Each is the command that was
typed, in an actor that holds its GPU. What they print comes out here, and Ctrl-C goes to all of them.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from offline_grpo.config.compose import quoted
from offline_grpo.engine.spawn import end_with_parent
from offline_grpo.errors import GrpoError, exit_code_of, require
from offline_grpo.history.signals import StopSignal, num_processes
from offline_grpo.settings import RunConfig

POLL_S = 0.5
END_S = 15.0  # after one process has failed, for the others, which wait for it in a collective operation
MAX_LINE_BYTES = 2**20
STARTED = "OFFLINE_GRPO_STARTED_BY_RAY"  # set for the processes that are started here
OF_THIS_PROCESS = ("RAY_", "CUDA_VISIBLE_DEVICES", "HYDRA_FULL_ERROR")  # environment variables that are not handed on


def train(config: RunConfig, folder: Path) -> None:
    """Train in the folder of a run, which all machines must see, until all processes have ended. Exits with their exit
    code. Raises ConfigError where no cluster answers or has room, GrpoError where a machine was lost.
    """
    fix = "starts the training processes itself; leave torchrun or accelerate launch out"
    require(num_processes() == 1, "placement.trainer", "ray", fix)
    fix = "starts the processes of one run; for a sweep on the cluster use hydra/launcher=ray"
    require(
        not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN, "placement.trainer", "ray", fix
    )
    placement = config.placement
    assert placement.address is not None  # see PlacementConfig
    fix = "would end with this command; training needs a cluster that stays, or here accelerate launch"
    require(placement.address != "local", "placement.address", "local", fix)
    from offline_grpo.engine.ray_actor import Room

    # Room for all of them at once: none could begin without the others.
    size = "placement.num_trainers", placement.num_trainers
    gpus = 0 if config.model.device == "cpu" else 1
    with closing(Room(placement.address, placement.ray_init, *size, gpus=gpus, strategy="PACK")) as room:
        print(f"starting the training processes on the Ray cluster at {placement.address}: {room.machines}", flush=True)
        actors = start([room.hire(index, TrainingActor) for index in range(placement.num_trainers)], folder)
        with StopSignal.listening() as stop, stop.held("the training processes have saved"):
            code = wait(actors, stop)
    if code != 0:
        sys.exit(code)


class TrainingActor:
    """The Ray actor of a training process: starts it, passes its output on, and ends it with itself."""

    async def place(self) -> tuple[str, str, int, list[str]]:
        """The machine, its address, a port on which nobody listens, and the GPUs of this actor."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address(), port, [str(gpu) for gpu in ray.get_gpu_ids()]

    async def start(
        self, command: Sequence[str], folder: str, typed_in: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        """Start the process with the variables in `env`, those of this machine, and those where the user typed."""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env={**typed_in, **os.environ, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            preexec_fn=end_with_parent,  # whatever ends the actor
        )

    async def read(self) -> bytes | int:
        """The next line that the process prints, or at last its exit code: 128 + N after signal N."""
        assert self._process.stdout is not None
        if line := await self._process.stdout.readline():
            return line
        return exit_code_of(await self._process.wait())

    async def interrupt(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def start(actors: Sequence[Any], folder: Path) -> list[Any]:
    """Start the typed command, in this folder, in each actor. Returns them by rank, a machine's in a row."""
    import ray

    # The command as it was typed, in this folder.
    typed = [word for word in sys.argv[1:] if not word.startswith("hydra.run.dir=")]
    script = Path(sys.argv[0]).absolute()
    program = ["-m", script.parent.name] if script.name == "__main__.py" else [str(script)]
    command = [sys.executable, *program, f"hydra.run.dir={quoted(folder.absolute())}", *typed]

    # Ranks follow the machines, so that those of one machine are local ranks there.
    found: list[Any] = ray.get([actor.place.remote() for actor in actors])
    nodes = [place[0] for place in found]
    order = sorted(range(len(actors)), key=lambda index: nodes.index(nodes[index]))
    actors, places = [actors[index] for index in order], [found[index] for index in order]

    # Each gets what torchrun would set, over what its machine has, over what was set where the user typed.
    typed_in = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_PROCESS)}
    started = []
    for rank, (node, *_) in enumerate(places):
        beside = [other for other, place in enumerate(places) if place[0] == node]
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": places[0][1],
            "MASTER_PORT": str(places[0][2]),
            STARTED: "1",
            "PYTHONUNBUFFERED": "1",
        }
        if gpus := [gpu for other in beside for gpu in places[other][3]]:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        started.append(actors[rank].start.remote(command, str(Path.cwd()), typed_in, env))
    ray.get(started)
    return actors


def wait(actors: Sequence[Any], stop: StopSignal) -> int:
    """Print what the processes print, and pass a signal on, until they have ended. Returns the first failure's code."""
    import ray
    from ray.exceptions import RayActorError

    from offline_grpo.engine.ray_actor import fate

    reading = {actor.read.remote(): rank for rank, actor in enumerate(actors)}
    failed, is_told, deadline = 0, False, math.inf  # the others may wait for a failed one in a collective operation
    while reading and time.monotonic() < deadline:
        if stop.number is not None and not is_told:
            is_told = True
            ray.get([actor.interrupt.remote(stop.number) for actor in actors])
        for reference in ray.wait(list(reading), timeout=POLL_S)[0]:
            rank = reading.pop(reference)
            try:
                read: Any = ray.get(reference)
            except RayActorError as error:
                fix = "go on with resume=auto, which takes any number of processes"
                raise GrpoError(f"the machine of training process {rank} {fate(error)}; {fix}") from error
            if isinstance(read, bytes):
                os.write(1, read)
                reading[actors[rank].read.remote()] = rank
            elif read != 0 and failed == 0:
                failed, deadline = read, time.monotonic() + END_S
    return failed
