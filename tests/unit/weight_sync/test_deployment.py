"""A deployment: of several engines, and of several processes, of which the first moves the weights."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from engines import CLIENT, full_weights

from offline_grpo.engine.streaming import SpreadClient
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineDied
from offline_grpo.placement.ranks import Ranks
from offline_grpo.types import ServedWeights
from offline_grpo.weight_sync.deployment import Deployment
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import Staged, SyncRequirements

POLICY: Any = SimpleNamespace(lora_rank=None)


class FakeEngine(VllmEngine):
    """A server of the run without a process. Tests say when it dies."""

    pid: int | None = None
    has_ended = False

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(**CLIENT, base_url=name)
        self.is_managed = True
        self.calls = calls

    def begin(self, model: str, args: Any) -> None:
        self.calls.append(f"begin {self.base_url}")
        self.has_ended = False

    def start(self, model: str, args: Any) -> None:
        self.calls.append(f"start {self.base_url}")
        self.check_alive()

    def stop(self) -> None:
        self.calls.append(f"stop {self.base_url}")

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        if self.has_ended:
            raise EngineDied(f"{self.base_url} has ended.")


class Sync:
    """Notes what it is told to do, and has the requirements of a test."""

    name = "noted"
    interval = 1

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.requires = SyncRequirements(engine=VllmEngine)

    def start_words(self, _: Any, *, is_recovery: bool) -> tuple[str, dict[str, Any]]:
        return "model", {}

    def attach(self, engine: VllmEngine, _: Any) -> None:
        self._note("attach", engine)

    def detach(self, engine: VllmEngine) -> None:
        self._note("detach", engine)

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[Staged]:
        self.calls.append(f"stage {version}")
        yield Staged(version=version, name=f"adapter-{version}", num_tensors=2, num_bytes=8)

    def deliver(self, engines: Sequence[VllmEngine], staged: Staged) -> float:
        for engine in engines:
            self._apply(engine)
        return 0.0

    def _apply(self, engine: VllmEngine) -> None:
        self._note("apply", engine)
        engine.check_alive()

    def verify(self, engines: Sequence[VllmEngine], snapshot: Snapshot, version: int) -> list[Proof]:
        for engine in engines:
            self._note("verify", engine)
        return []

    def check_served(self, engine: VllmEngine, version: int) -> None:
        self._note("asked", engine)
        engine.check_alive()

    def _note(self, what: str, engine: VllmEngine) -> None:
        self.calls.append(f"{what} {engine.base_url}")


class Lab:
    """Engines a, b and c, connected and pushed to."""

    def __init__(self, names: str = "abc", gpus: Mapping[str, list[int]] | None = None, ranks: Any = None) -> None:
        self.calls: list[str] = []
        self.sync: Any = Sync(self.calls)
        self.servers = {name: FakeEngine(name, self.calls) for name in names}
        for name, own in (gpus or {}).items():
            self.servers[name].gpus = own
        leads = None if ranks is None else (ranks, ranks.on_main)
        self.deployment = Deployment(list(self.servers.values()), self.sync, full_weights, leads)
        self.deployment.connect(POLICY)
        self.of_connect = list(self.calls)
        self.push(1)

    def push(self, version: int, **options: bool) -> list[str]:
        """The calls that it makes."""
        self.calls.clear()
        self.deployment.push(POLICY, version=version, **options)
        return list(self.calls)

    def check(self) -> list[str]:
        self.calls.clear()
        self.deployment.check_served()
        return list(self.calls)

    @property
    def asked(self) -> str:
        """The engines that get requests."""
        assert isinstance(self.deployment.client, SpreadClient)
        return "".join(client.base_url for client in self.deployment.client.serving)


def of_push(version: int, names: str) -> list[str]:
    return [f"stage {version}", *(f"apply {name}" for name in names), *(f"verify {name}" for name in names)]


def test_servers_on_one_gpu_start_one_after_the_other() -> None:
    """While one starts it measures what it takes of the GPU."""
    lab = Lab(gpus={"a": [0], "b": [0], "c": [1]})
    begun = ["begin a", "begin c"]  # a real server's `start` begins what has not begun
    assert lab.of_connect == [*begun, "start a", "attach a", "start b", "attach b", "start c", "attach c"]


def test_what_others_sample_counts_and_the_next_push_starts_the_dead_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, asked = Lab(), []
    monkeypatch.setattr(lab.servers["a"], "stop", lambda: asked.append(lab.asked))
    lab.servers["a"].has_ended = True
    assert lab.check() == ["asked b", "asked c"]
    stage, *delivery = of_push(2, "abc")
    pushed = ["begin a", "start a", "attach a", stage, "asked b", "asked c", *delivery]  # of a nothing was sampled
    assert lab.push(2, amid_requests=True) == pushed
    assert asked == ["bc"]  # meanwhile
    assert lab.asked == "abc"
    assert lab.check() == ["asked a", "asked b", "asked c"]
    assert lab.deployment.metrics()["engines/num_restarts"] == 1


def test_after_a_death_in_a_push_all_get_the_weights_again() -> None:
    lab = Lab()
    apply = lab.sync._apply

    def dies(engine: VllmEngine) -> None:
        lab.servers["b"].has_ended = True
        apply(engine)

    lab.sync._apply = dies
    with pytest.raises(EngineDied, match=r"^b has ended\.$"):
        lab.push(2)
    lab.sync._apply = apply
    lab.calls.clear()
    lab.deployment.push(POLICY, version=2, is_recovery=True)
    assert lab.calls == ["stop b", "begin b", "start b", "attach b", *of_push(2, "abc")]


def test_a_strategy_that_starts_all_servers_starts_the_dead_too() -> None:
    lab = Lab()
    lab.sync.requires = SyncRequirements(engine=VllmEngine, own_server=True)
    lab.sync._apply = lambda engine: lab.calls.append(f"anew {engine.base_url}")
    lab.servers["a"].has_ended = True
    assert [call for call in lab.push(2) if call.startswith(("anew", "begin"))] == ["anew a", "anew b", "anew c"]


# Several processes


class FirstOfTwo:
    """Messages of the first process, as they pass to the second: pickled."""

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

        ranks = SimpleNamespace(is_main=rank == 0, broadcast=broadcast)
        ranks.on_main = lambda action: Ranks.on_main(ranks, action)  # type: ignore[arg-type]
        return ranks


@pytest.fixture
def two() -> list[Lab]:
    wire = FirstOfTwo()
    labs = [Lab("a", ranks=wire.ranks(rank)) for rank in range(2)]
    labs[0].servers["a"].pid = 4711
    return labs


def test_the_first_process_moves_weights_and_the_others_follow(two: list[Lab]) -> None:
    for lab in two:
        lab.calls.clear()
    reports = [lab.deployment.push(POLICY, version=7) for lab in two]
    assert reports[0] == reports[1]
    assert two[0].calls == of_push(7, "a")
    assert (two[1].calls, two[1].servers["a"].watched_pid) == ([], 4711)
    assert [lab.deployment.client.weights for lab in two] == [ServedWeights(7, "adapter-7")] * 2


@pytest.mark.parametrize("name", ["push", "check_served"])
def test_an_error_of_the_first_is_raised_on_all(name: str, two: list[Lab]) -> None:
    two[0].servers["a"].has_ended = True
    two[0].servers["a"].begin = lambda *_, **__: None  # type: ignore[method-assign]  # it does not come back
    for lab in two:
        with pytest.raises(EngineDied, match="a has ended"):
            call = getattr(lab.deployment, name)
            call() if name == "check_served" else call(POLICY, version=1)
