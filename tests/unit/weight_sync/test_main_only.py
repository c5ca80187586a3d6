"""With several training processes one moves the weights, and all learn what came of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from offline_grpo.errors import ConfigError, EngineDied, EngineError, GrpoError
from offline_grpo.types import SyncReport
from offline_grpo.weight_sync.main_only import MainOnly

REPORT = SyncReport(version=3, num_tensors=2, num_bytes=8, seconds=1.0, paused_seconds=0.5)


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

        return SimpleNamespace(is_main=rank == 0, rank=rank, world_size=2, broadcast=broadcast, heard=lambda: position)


class Strategy:
    """Serves every push under a new name, and notes the calls. `error` is raised by the next one."""

    shares_weights = True

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None
        self.client: Any = None

    def connect(self, policy: Any, client: Any) -> None:
        self.client = client
        self._do("connect", policy)

    def push(self, policy: Any, *, version: int, force: bool = True) -> SyncReport:
        self._do("push", policy, version, force)
        return REPORT

    def check_served(self) -> None:
        self._do("check_served")

    def recover(self, policy: Any, *, version: int) -> None:
        self._do("recover", policy, version)

    def close(self) -> None:
        self.calls.append("close")

    def _do(self, *call: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(call)
        self.client.version = len(self.calls)
        if hasattr(self.client, "model_name"):
            self.client.model_name = f"adapter-{len(self.calls)}"


@dataclass
class Found:
    """A server that this process has not started, and what it was told to watch."""

    pid: int | None = None
    watched: int | None = None

    def watch(self, pid: int | None) -> None:
        self.watched = pid


class Processes:
    """Two processes, one after the other: the second hears what the first has said."""

    def __init__(self, **client: Any) -> None:
        wire = Wire()
        self.ranks = [wire.ranks(rank) for rank in range(2)]
        self.strategies = [Strategy(), Strategy()]
        self.syncs = [MainOnly(strategy, ranks) for strategy, ranks in zip(self.strategies, self.ranks, strict=True)]
        self.clients = [SimpleNamespace(version=0, server=Found(), **client) for _ in range(2)]
        self.clients[0].server.pid = 4711  # it has started the server

    def all(self, action: Callable[[MainOnly, Any], Any]) -> list[Any]:
        results: list[Any] = []
        for sync, client in zip(self.syncs, self.clients, strict=True):
            try:
                results.append(action(sync, client))
            except GrpoError as error:
                results.append((type(error), str(error)))
        assert self.ranks[0].heard() == self.ranks[1].heard(), "a process waits for ever"
        return results


@pytest.fixture
def processes() -> Processes:
    started = Processes(model_name="")
    started.all(lambda sync, client: sync.connect("policy", client))
    return started


def test_only_the_first_moves_weights(processes: Processes) -> None:
    reports = processes.all(lambda sync, _: sync.push("policy", version=7, force=False))
    processes.all(lambda sync, _: sync.recover("policy", version=8))
    processes.all(lambda sync, _: sync.close())
    assert reports == [REPORT, REPORT]
    assert processes.strategies[0].calls == [("connect", "policy"), ("push", "policy", 7, False), ("recover", "policy", 8), "close"]
    assert processes.strategies[1].calls == ["close"]
    assert [sync.shares_weights for sync in processes.syncs] == [True, False]


@pytest.mark.parametrize("action", [lambda sync, _: sync.push("p", version=7), lambda sync, _: sync.recover("p", version=7)])
def test_all_clients_ask_for_the_same_weights(action: Any, processes: Processes) -> None:
    """A new adapter has a new name, after a recovery too."""
    processes.all(action)
    assert [(client.version, client.model_name) for client in processes.clients] == [(2, "adapter-2")] * 2


@pytest.mark.parametrize("action", [lambda sync, _: sync.push("p", version=7), lambda sync, _: sync.recover("p", version=7)])
def test_a_client_whose_requests_name_no_model(action: Any) -> None:
    """SGLang's."""
    processes = Processes()
    processes.all(lambda sync, client: sync.connect("policy", client))
    processes.all(action)
    assert [vars(client).keys() for client in processes.clients] == [{"version", "server"}] * 2
    assert [client.version for client in processes.clients] == [2, 2]


@pytest.mark.parametrize("error", [ConfigError("key=1: no"), EngineError("no"), EngineDied("the server has ended")])
@pytest.mark.parametrize("name", ["connect", "push", "check_served", "recover"])
def test_an_error_of_the_first_is_raised_on_all(error: GrpoError, name: str, processes: Processes) -> None:
    processes.strategies[0].error = error
    actions: dict[str, Callable[[MainOnly, Any], Any]] = {
        "connect": lambda sync, client: sync.connect("p", client),
        "push": lambda sync, _: sync.push("p", version=1),
        "check_served": lambda sync, _: sync.check_served(),
        "recover": lambda sync, _: sync.recover("p", version=1),
    }
    assert processes.all(actions[name]) == [(type(error), str(error))] * 2


def test_the_others_watch_the_server_of_the_first(processes: Processes) -> None:
    """After a recovery it is another."""
    assert [client.server.watched for client in processes.clients] == [None, 4711]
    processes.clients[0].server.pid = 4712
    processes.all(lambda sync, _: sync.recover("policy", version=1))
    assert [client.server.watched for client in processes.clients] == [None, 4712]


def test_what_is_no_error_of_a_run_is_not_hidden(processes: Processes) -> None:
    processes.strategies[0].error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        processes.syncs[0].push("p", version=1)
