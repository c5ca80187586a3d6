"""Scores completions on all machines of a Ray cluster (`placement.score_on_cluster`)."""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_grpo.engine.ray_cluster import connect
from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.scoring.messages import Setup, failed
from offline_grpo.generation.scoring.scorers import Scorers
from offline_grpo.types import Problem

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 10.0
"""How often machines are looked for that have joined the cluster."""
AGAIN_S = 60.0
"""A lost machine is not asked again before: Ray may take this long to see that it is lost."""
MAX_LOST = 3
"""So many machines may be lost with a completion before it counts as one that kills them."""


class ScoringActor:
    """What Ray runs on each machine: the `Scorers` there, in the run's working directory where the machine sees it.

    Args:
        paths: where modules are looked for beside the machine's own places.
    """

    def __init__(self, setup: Setup, folder: Path, paths: Sequence[str]) -> None:
        with suppress(OSError):
            os.chdir(folder)
        sys.path.extend(path for path in paths if path not in sys.path)
        self._scorers = Scorers(setup)

    async def answer(self, problem: Problem, text: str) -> dict[str, Any]:
        """See `Scorers.answer`. The error names the machine."""
        try:
            return await self._scorers.answer(problem, text)
        except ScoreError as error:
            raise ScoreError(f"{platform.node()}, a machine of the Ray cluster: {error}") from error


@dataclass(eq=False)
class _Machine:
    node_id: str
    name: str
    actor: Any
    num_open: int = 0


class ClusterScorers:
    """Asks the machine with the fewest open requests. What a lost machine was asked, another one is asked.

    Args:
        address, ray_init: see `connect`.
        setup: of the processes on each machine.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or none of its machines has CPU cores.
    """

    def __init__(self, address: str, ray_init: Mapping[str, Any], setup: Setup) -> None:
        self._address, self._setup = address, setup
        self._is_ours = connect(address, ray_init)
        self._machines: dict[str, _Machine] = {}
        self._changing = threading.Lock()  # a run closes it while the thread that awaits scores loses machines
        self._is_closed = False
        self._looked_s = -math.inf
        self._lost_s: dict[str, float] = {}
        try:
            self._look()
            if not self._machines:
                fix = f"no machine of the Ray cluster at placement.address={address} has CPU cores; leave it at false"
                raise ConfigError(f"placement.score_on_cluster=true: {fix}")
        except BaseException:
            self.close()
            raise
        names = ", ".join(machine.name for machine in self._machines.values())
        log.info("scoring on %d machines of the Ray cluster: %s", len(self._machines), names)

    async def answer(self, problem: Problem, text: str) -> dict[str, Any]:
        """See `Scorers.answer`.

        Raises:
            ScoreError: as there; also if no machine is left.
        """
        from ray.exceptions import RayActorError, RayTaskError

        for _ in range(MAX_LOST):
            machine = self._least_busy()
            machine.num_open += 1
            try:
                answer: dict[str, Any] = await machine.actor.answer.remote(problem, text)
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError:
                self._lose(machine)
            else:
                return answer
            finally:
                machine.num_open -= 1
        return failed("crashed", f"{MAX_LOST} machines of the Ray cluster were lost while they scored it")

    def close(self) -> None:
        """End all processes of it, on every machine."""
        import ray

        with self._changing:
            self._is_closed = True
            machines, self._machines = list(self._machines.values()), {}
        for machine in machines:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(machine.actor)
        if self._is_ours:
            ray.shutdown()

    def _least_busy(self) -> _Machine:
        with self._changing:
            if self._is_closed:
                raise ScoreError("the run lets go of the Ray cluster, so nothing is scored there any more")
            if not self._machines or time.monotonic() - self._looked_s > LOOK_INTERVAL_S:
                self._look()
            if not self._machines:
                raise ScoreError(
                    f"no machine is left in the Ray cluster at placement.address={self._address} that could score"
                )
            return min(self._machines.values(), key=lambda machine: machine.num_open)

    def _look(self) -> None:
        """Have an actor on every machine with CPU cores that has none yet."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._looked_s = now = time.monotonic()
        found = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
        new = {node_id: node for node_id, node in found.items() if node_id not in self._machines}
        sound = {node_id: node for node_id, node in new.items() if now - self._lost_s.get(node_id, -math.inf) > AGAIN_S}
        for node_id, node in (sound if self._machines or sound else new).items():
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            # of no CPU core as Ray counts them: those are for servers, and scoring is short
            actor = (
                ray.remote(ScoringActor)
                .options(num_cpus=0, scheduling_strategy=there)
                .remote(self._setup, Path.cwd(), sys.path)
            )
            self._machines[node_id] = _Machine(node_id, node["NodeManagerHostname"], actor)

    def _lose(self, machine: _Machine) -> None:
        with self._changing:
            if self._machines.get(machine.node_id) is not machine:
                return
            del self._machines[machine.node_id]
            self._lost_s[machine.node_id] = time.monotonic()
        log.warning("the machine %s of the Ray cluster has gone; its completions are scored on others", machine.name)
