"""Scores completions on all machines of a Ray cluster (`placement.score_on_cluster`)."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_grpo.engine.ray_actor import connect, fate
from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.scoring.pool import Scorers
from offline_grpo.generation.scoring.worker import Setup, failed
from offline_grpo.types import Problem

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 60.0
"""How often machines are looked for that have none of our actors: new ones, and lost ones, which Ray may still count
for as long."""
MAX_LOST = 3
"""So many machines may be lost with a completion before it counts as one that kills them."""


class ScoringActor:
    """The actor on each machine: the `Scorers` there, in the run's working directory where the machine sees it.

    Args:
        paths: where modules are looked for beside the machine's own places.
    """

    def __init__(self, setup: Setup, folder: Path, paths: Sequence[str]) -> None:
        with suppress(OSError):
            os.chdir(folder)
        sys.path.extend(path for path in paths if path not in sys.path)
        self._scorers = Scorers(setup)

    async def answer(self, problem: Problem, text: str | tuple[str, ...]) -> dict[str, Any]:
        return await self._scorers.answer(problem, text)


@dataclass(eq=False)
class _Machine:
    name: str
    actor: Any
    num_open: int = 0


class ClusterScorers:
    """Asks the machine with the fewest open requests. The requests of a lost machine go to another one.

    Actors, because a plain Ray task would hold a Ray process for every completion that is awaited.

    Args:
        address, ray_init: see `connect`.
        setup: of the processes on each machine.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or none of its machines has CPU cores.
    """

    def __init__(self, address: str, ray_init: Mapping[str, Any], setup: Setup) -> None:
        self._address, self._setup = address, setup
        self._is_ours = connect(address, ray_init)
        self._machines: dict[str, _Machine] = {}  # by Ray's id of the node
        self._is_closed = False
        self._look()
        if not self._machines:
            self.close()
            fix = f"no machine of the Ray cluster at placement.address={address} has CPU cores; leave it at false"
            raise ConfigError(f"placement.score_on_cluster=true: {fix}")
        names = ", ".join(machine.name for machine in self._machines.values())
        log.info("scoring on %d machines of the Ray cluster: %s", len(self._machines), names)

    async def answer(self, problem: Problem, text: str | tuple[str, ...]) -> dict[str, Any]:
        """See `Scorers.answer`. Raises ScoreError as there, also if no machine is left."""
        from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

        for _ in range(MAX_LOST):
            node, machine = self._least_busy()
            machine.num_open += 1
            try:
                return await machine.actor.answer.remote(problem, text)
            except RayTaskError as error:
                raise error.cause from None
            except (RayActorError, ActorUnschedulableError) as error:  # the second: Ray does not know of it yet
                if self._machines.get(node) is machine and not self._is_closed:
                    del self._machines[node]
                    self._looked_s = time.monotonic()
                    words = "the machine %s of the Ray cluster %s; its completions are scored on others"
                    log.warning(words, machine.name, fate(error))
            finally:
                machine.num_open -= 1
        return failed("crashed", f"{MAX_LOST} machines of the Ray cluster were lost while they scored it")

    def close(self) -> None:
        """End all processes of it, on every machine."""
        import ray

        self._is_closed = True
        for machine in self._machines.values():
            with suppress(Exception):  # the cluster may be gone
                ray.kill(machine.actor)
        if self._is_ours:
            ray.shutdown()

    def _least_busy(self) -> tuple[str, _Machine]:
        if self._is_closed:
            raise ScoreError("the run leaves the Ray cluster, so nothing is scored there any more")
        if not self._machines or time.monotonic() - self._looked_s > LOOK_INTERVAL_S:
            self._look()
        if not self._machines:
            raise ScoreError(f"no machine is left in the Ray cluster at placement.address={self._address} to score on")
        return min(self._machines.items(), key=lambda item: item[1].num_open)

    def _look(self) -> None:
        """Start an actor on every machine with CPU cores that has none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._looked_s = time.monotonic()
        for node in ray.nodes():
            if node["NodeID"] not in self._machines and node["Alive"] and node["Resources"].get("CPU"):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                # of no CPU core as Ray counts them: those are for servers, and scoring is short
                kind = ray.remote(ScoringActor).options(num_cpus=0, scheduling_strategy=there)
                actor = kind.remote(self._setup, Path.cwd(), sys.path)
                self._machines[node["NodeID"]] = _Machine(node["NodeManagerHostname"], actor)
