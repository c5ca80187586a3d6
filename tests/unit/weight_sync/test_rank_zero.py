"""With several training processes one moves the weights, and all learn what came of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from engines import full_weights

from offline_grpo.engine.engine import ServerEngine
from offline_grpo.errors import ConfigError, EngineDied, EngineError, GrpoError
from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import SamplingParams, ServedWeights
from offline_grpo.weight_sync.deployment import Deployment
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.rank_zero import RankZeroDeployment
from offline_grpo.weight_sync.requirements import SyncRequirements
from offline_grpo.weight_sync.strategy import Staged

POLICY: Any = SimpleNamespace(lora_rank=None)


class Wire:
    """Messages of the first process, as they pass: pickled."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def ranks(self, rank: int) -> Any:
        position = 0

        def broadcast(value: Any) -> Any:
            nonlocal position
            if rank == 0:
                self.messages.append(pickle.dumps(value))
            position += 1
            return pickle.loads(self.messages[position - 1])

        ranks = SimpleNamespace(is_main=rank == 0, rank=rank, world_size=2, broadcast=broadcast, heard=lambda: position)
        ranks.on_main = lambda action: Ranks.on_main(ranks, action)  # type: ignore[arg-type]
        return ranks


class Strategy:
    """Serves every push under a new name, and notes the calls. `error` is raised by the next one."""

    name = "noted"
    interval = 1
    requires = SyncRequirements(engines=("vLLM",))

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def start_model(self, _: Any) -> str:
        self._do("start_model")
        return "model"

    recovery_model = start_model

    def start_args(self, _: Any) -> Mapping[str, Any]:
        return {}

    def attach(self, *_: Any) -> None:
        self._do("attach")

    def reattach(self, *_: Any) -> None:
        self._do("reattach")

    def staged(self, _: Any, version: int) -> AbstractContextManager[Staged]:
        self._do("push", version)
        return nullcontext(Staged(version=version, name=f"adapter-{version}", num_tensors=2, num_bytes=8))

    def deliver(self, *_: Any) -> float:
        return 0.5

    def verify(self, *_: Any) -> list[Proof]:
        return []

    def check_served(self, _: Any, version: int) -> None:
        self._do("check_served", version)

    def detach(self, _: Any) -> None:
        self.calls.append("detach")

    def _do(self, *call: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(call)


class FakeServer:
    """Rank 0's, which gets a new process with each start, or what another rank found."""

    def __init__(self, *, is_managed: bool) -> None:
        self.is_managed = is_managed
        self.base_url, self.gpus = "http://server", None
        self.pid: int | None = None
        self.watched: int | None = None
        self.is_dead = False
        self._pids = iter((4711, 4712))

    def begin(self, _: str, *, args: Any) -> None: ...

    def start(self, _: str, *, args: Any) -> None:
        self.pid, self.is_dead = next(self._pids), False

    def stop(self) -> None: ...

    @property
    def has_ended(self) -> bool:
        return self.is_dead

    def check_alive(self) -> None:
        if self.is_dead:
            raise EngineDied("the server has ended")

    def watch(self, pid: int | None) -> None:
        self.watched = pid

    def move_to(self, base_url: str) -> None:
        self.base_url = base_url


class Client:
    engine_name = "vLLM"

    def __init__(self, *, is_managed: bool) -> None:
        self.server = FakeServer(is_managed=is_managed)
        self.weights = ServedWeights()

    def control(self, _: Any) -> Any:
        return SimpleNamespace(check_version=lambda: "1.0")

    def close(self) -> None: ...


class Processes:
    """Two processes, one after the other: the second hears what the first has said."""

    def __init__(self) -> None:
        wire = Wire()
        self.ranks = [wire.ranks(rank) for rank in range(2)]
        self.strategies = [Strategy(), Strategy()]
        self.clients: list[Any] = [Client(is_managed=True), Client(is_managed=False)]
        inner = [
            Deployment([ServerEngine(c, SamplingParams(1))], s, full_weights)
            for c, s in zip(self.clients, self.strategies, strict=True)
        ]
        self.deployments = [
            RankZeroDeployment(one, ranks, ranks.on_main) for one, ranks in zip(inner, self.ranks, strict=True)
        ]

    def all(self, action: Callable[[RankZeroDeployment], Any]) -> list[Any]:
        results: list[Any] = []
        for deployment in self.deployments:
            try:
                results.append(action(deployment))
            except GrpoError as error:
                results.append((type(error), str(error)))
        assert self.ranks[0].heard() == self.ranks[1].heard(), "a process waits for ever"
        return results


@pytest.fixture
def processes() -> Processes:
    started = Processes()
    started.all(lambda deployment: deployment.connect(POLICY))
    return started


def die(processes: Processes) -> None:
    processes.clients[0].server.is_dead = True


def test_only_the_first_moves_weights(processes: Processes) -> None:
    reports = processes.all(lambda deployment: deployment.push(POLICY, version=7))
    die(processes)
    processes.all(lambda deployment: deployment.recover(POLICY, version=8))
    processes.all(lambda deployment: deployment.close())
    assert reports[0] == reports[1]
    assert (reports[0].version, reports[0].num_tensors, reports[0].paused_seconds) == (7, 2, 0.5)
    first, second = (strategy.calls for strategy in processes.strategies)
    assert first == [("start_model",), ("attach",), ("push", 7), ("start_model",), ("reattach",), ("push", 8), "detach"]
    assert second == ["detach"]


@pytest.mark.parametrize("name", ["push", "recover"])
def test_all_clients_ask_for_the_same_weights(name: str, processes: Processes) -> None:
    """A new adapter has a new name, after a recovery too."""
    processes.all(lambda deployment: getattr(deployment, name)(POLICY, version=7))
    assert [client.weights for client in processes.clients] == [ServedWeights(7, "adapter-7")] * 2
    assert [deployment.client for deployment in processes.deployments] == processes.clients


@pytest.mark.parametrize("error", [ConfigError("key=1: no"), EngineError("no"), EngineDied("the server has ended")])
@pytest.mark.parametrize("name", ["connect", "push", "check_served", "recover"])
def test_an_error_of_the_first_is_raised_on_all(error: GrpoError, name: str, processes: Processes) -> None:
    processes.all(lambda deployment: deployment.push(POLICY, version=1))
    processes.strategies[0].error = error
    actions: dict[str, Callable[[RankZeroDeployment], Any]] = {
        "connect": lambda deployment: deployment.connect(POLICY),
        "push": lambda deployment: deployment.push(POLICY, version=1),
        "check_served": lambda deployment: deployment.check_served(),
        "recover": lambda deployment: deployment.recover(POLICY, version=1),
    }
    assert processes.all(actions[name]) == [(type(error), str(error))] * 2


def test_the_others_watch_the_server_of_the_first(processes: Processes) -> None:
    """After a recovery it is another."""
    assert [client.server.watched for client in processes.clients] == [None, 4711]
    die(processes)
    processes.all(lambda deployment: deployment.recover(POLICY, version=1))
    assert [client.server.watched for client in processes.clients] == [None, 4712]
