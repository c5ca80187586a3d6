"""A deployment of several engines: which of them get the weights, are asked and are started again, as they die and come
back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from engines import full_weights

from offline_grpo.engine.engine import ServerEngine
from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.generation.spread import SpreadClient
from offline_grpo.types import SamplingParams, ServedWeights
from offline_grpo.weight_sync.deployment import Deployment
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.requirements import SyncRequirements
from offline_grpo.weight_sync.snapshot import Snapshot
from offline_grpo.weight_sync.strategy import Staged

POLICY: Any = SimpleNamespace(lora_rank=None)


class FakeServer:
    """What a deployment sees of a server process. Tests say when it dies, and when one that was begun is ready."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.base_url, self.is_managed = name, True
        self.gpus: list[int] | None = None
        self._calls = calls
        self.pid: int | None = None
        self.has_ended = self.is_ready = False

    def begin(self, model: str, *, args: Any) -> None:
        self._calls.append(f"begin {self.base_url}")
        self.has_ended = False

    def start(self, model: str, *, args: Any) -> None:
        self._calls.append(f"start {self.base_url}")
        self.check_alive()

    def stop(self) -> None:
        self._calls.append(f"stop {self.base_url}")

    def check_alive(self) -> None:
        if self.has_ended:
            raise EngineDied(f"{self.base_url} has ended.")


class Client:
    engine_name = "vLLM"
    batch_size = 4

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.weights = ServedWeights()

    def control(self, _: Any) -> Any:
        return SimpleNamespace(check_version=lambda: "1.0")

    def close(self) -> None: ...


class Sync:
    """Notes what it is told to do, and has the requirements of a test."""

    name = "noted"
    interval = 1

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.requires = SyncRequirements(engines=("vLLM",))
        self.served: dict[str, Exception] = {}
        self.replaced: dict[str, int] = {}

    def start_model(self, _: Any) -> str:
        return "model"

    recovery_model = start_model

    def start_args(self, _: Any) -> Mapping[str, Any]:
        return {}

    def attach(self, engine: ServerEngine, _: Any) -> None:
        self._note("attach", engine)

    def reattach(self, engine: ServerEngine, _: Any) -> None:
        self._note("reattach", engine)

    def detach(self, engine: ServerEngine) -> None:
        self._note("detach", engine)

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[Staged]:
        self.calls.append(f"stage {version} at {snapshot.host.server.base_url}")
        yield Staged(version=version, name=f"adapter-{version}", num_tensors=2, num_bytes=8)

    def deliver(self, engines: Sequence[ServerEngine], staged: Staged) -> float:
        self.replaced = {engine.server.base_url: version for engine, version in staged.replaces.items()}
        for engine in engines:
            self._apply(engine)
        return 0.0

    def _apply(self, engine: ServerEngine) -> None:
        self._note("apply", engine)
        engine.check_alive()

    def verify(self, engines: Sequence[ServerEngine], snapshot: Snapshot, version: int) -> list[Proof]:
        for engine in engines:
            self._prove(engine)
        return []

    def _prove(self, engine: ServerEngine) -> None:
        self._note("verify", engine)

    def check_served(self, engine: ServerEngine, version: int) -> None:
        self._note("asked", engine)
        engine.check_alive()
        if engine.server.base_url in self.served:
            raise self.served[engine.server.base_url]

    def _note(self, what: str, engine: ServerEngine) -> None:
        self.calls.append(f"{what} {engine.server.base_url}")


class Lab:
    """Engines a, b and c, connected and pushed to."""

    def __init__(self, names: str = "abc", gpus: Mapping[str, list[int]] | None = None) -> None:
        self.calls: list[str] = []
        self.sync: Any = Sync(self.calls)
        self.servers = {name: FakeServer(name, self.calls) for name in names}
        for name, own in (gpus or {}).items():
            self.servers[name].gpus = own
        clients: list[Any] = [Client(server) for server in self.servers.values()]  # type: ignore[arg-type]
        self.deployment = Deployment(
            [ServerEngine(client, SamplingParams(1)) for client in clients], self.sync, full_weights
        )
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
        return "".join(client.server.base_url for client in self.deployment.client.serving)


def of_push(version: int, names: str, host: str) -> list[str]:
    return [f"stage {version} at {host}", *(f"apply {name}" for name in names), *(f"verify {name}" for name in names)]


def test_servers_start_side_by_side() -> None:
    assert Lab("ab").of_connect == ["begin a", "begin b", "start a", "attach a", "start b", "attach b"]


def test_servers_on_one_gpu_start_one_after_the_other() -> None:
    """While one starts it measures what it takes of the GPU."""
    lab = Lab(gpus={"a": [0], "b": [0], "c": [1]})
    begun = ["begin a", "begin c"]  # a real server's `start` begins what has not begun
    assert lab.of_connect == [*begun, "start a", "attach a", "start b", "attach b", "start c", "attach c"]
    for name in "ab":
        lab.servers[name].has_ended = True
    assert lab.push(2)[:3] == ["detach a", "stop a", "begin a"]
    assert lab.push(3) == of_push(3, "c", host="c")  # b waits for a
    lab.servers["a"].is_ready = True
    assert lab.push(4) == ["start a", "reattach a", "detach b", "stop b", "begin b", *of_push(4, "ac", host="a")]
    lab.servers["c"].has_ended = True
    lab.calls.clear()
    lab.deployment.recover(POLICY, version=4)
    assert lab.calls[:6] == ["stop c", "begin c", "start b", "reattach b", "start c", "reattach c"]


def test_a_dead_engine_is_started_beside_the_others_and_serves_when_it_is_ready() -> None:
    lab = Lab()
    lab.servers["a"].has_ended = True
    assert lab.check() == ["asked b", "asked c"]  # what it sampled counts
    assert lab.push(2) == ["detach a", "stop a", "begin a", *of_push(2, "bc", host="b")]
    assert lab.asked == "bc"
    assert lab.check() == ["asked b", "asked c"]
    assert lab.push(3) == of_push(3, "bc", host="b")  # it is not ready yet
    lab.servers["a"].is_ready = True
    assert lab.push(4) == ["start a", "reattach a", *of_push(4, "abc", host="a")]
    assert lab.asked == "abc"
    assert [engine.client.weights.version for engine in lab.deployment.engines] == [4, 4, 4]
    assert lab.check() == ["asked a", "asked b", "asked c"]
    assert lab.deployment.metrics()["engines/num_restarts"] == 1


def test_a_push_amid_requests_looks_at_what_those_have_that_are_asked() -> None:
    """One that has just come back has no requests, and only the weights that it started from."""
    lab = Lab("ab")
    assert lab.sync.replaced == {}
    lab.servers["b"].has_ended = True
    replaced = []
    for version in range(2, 6):
        lab.push(version, amid_requests=True)
        replaced.append(lab.sync.replaced)
        lab.servers["b"].is_ready = version == 3
    assert replaced == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4, "b": 4}]
    lab.push(6)
    assert lab.sync.replaced == {}


def test_one_that_is_started_again_is_not_asked_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others sample while a push begins to start it, also where no other one has been proven yet."""
    lab, asked = Lab("ab"), []
    for server in lab.servers.values():
        monkeypatch.setattr(server, "begin", lambda *_, **__: asked.append(lab.asked))
    lab.servers["b"].has_ended = True
    lab.push(2)
    lab.servers["b"].has_ended, lab.servers["b"].is_ready, lab.servers["a"].has_ended = False, True, True
    lab.push(3)
    assert asked == ["a", ""]
    assert lab.asked == "b"


def test_one_that_dies_again_while_it_starts_is_waited_for() -> None:
    """As any engine that cannot be left to itself: the loop recovers, and a second failure ends the run."""
    lab = Lab()
    lab.servers["c"].has_ended = True
    lab.push(2)
    lab.servers["c"].has_ended = lab.servers["c"].is_ready = True
    with pytest.raises(EngineDied, match=r"^c has ended\.$"):
        lab.push(3)
    lab.calls.clear()
    lab.deployment.recover(POLICY, version=3)
    assert lab.calls == ["stop c", "begin c", "start c", "reattach c", *of_push(3, "abc", host="a")]
    assert lab.asked == "abc"


def test_recovery_waits_for_those_that_are_being_started() -> None:
    """The last one that served has died too."""
    lab = Lab("ab")
    lab.servers["a"].has_ended = True
    lab.push(2)
    lab.servers["b"].has_ended = True
    with pytest.raises(EngineDied, match=r"^b has ended\.$"):
        lab.check()
    with pytest.raises(EngineDied, match=r"^b has ended\.$"):
        lab.push(3)
    assert lab.calls.count("begin b") == 0  # nobody else serves meanwhile
    lab.calls.clear()
    lab.deployment.recover(POLICY, version=3)
    assert lab.calls == [
        "stop b",
        "begin b",
        "start a",
        "reattach a",
        "start b",
        "reattach b",
        *of_push(3, "ab", host="a"),
    ]
    assert lab.asked == "ab"


def dying(lab: Lab, name: str, *, what: str) -> None:
    """The engine dies when the strategy does this with it."""
    original = getattr(lab.sync, what)

    def dies(engine: ServerEngine, *args: Any) -> Any:
        if engine.server.base_url == name:  # type: ignore[comparison-overlap]
            lab.servers[name].has_ended = True
        result = original(engine, *args)
        engine.check_alive()
        return result

    setattr(lab.sync, what, dies)


@pytest.mark.parametrize("what", ["_apply", "_prove"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_push_goes_on_without_one_that_dies_in_it(name: str, what: str) -> None:
    """From the beginning: what was staged may have lain in the folder of the dead."""
    lab = Lab()
    dying(lab, name, what=what)
    others = "abc".replace(name, "")
    calls = lab.push(2)
    assert calls[-8:] == [f"detach {name}", f"stop {name}", f"begin {name}", *of_push(2, others, host=others[0])]
    assert lab.asked == others
    assert lab.deployment.metrics()["engines/num_restarts"] == 1


def test_one_that_dies_while_it_is_asked_what_it_serves_is_left_out() -> None:
    lab = Lab()
    dying(lab, "b", what="check_served")
    assert lab.check() == ["asked a", "asked b", "asked c"]
    assert lab.check() == ["asked a", "asked c"]


def test_when_all_die_in_a_push_the_run_recovers() -> None:
    lab = Lab("ab")
    for name in "ab":
        dying(lab, name, what="_apply")
    with pytest.raises(EngineDied, match=r"^[ab] has ended\.$"):
        lab.push(2)


def test_a_strategy_that_starts_all_servers_starts_the_dead_too() -> None:
    lab = Lab()
    lab.sync.requires = SyncRequirements(engines=("vLLM",), own_server=True)
    lab.sync._apply = lambda engine: lab.calls.append(f"anew {engine.server.base_url}")
    lab.servers["a"].has_ended = True
    assert [call for call in lab.push(2) if call.startswith(("anew", "begin"))] == ["anew a", "anew b", "anew c"]
    assert lab.asked == "abc"


def test_every_engine_that_serves_must_have_what_was_pushed() -> None:
    lab = Lab()
    lab.sync.served["c"] = EngineError("another run's")
    with pytest.raises(EngineError):
        lab.check()


def test_other_processes_ask_those_that_serve() -> None:
    first, other = Lab(), Lab()
    watched: dict[str, Any] = {}
    for name in "abc":
        first.servers[name].pid = ord(name)
        other.servers[name].watch = lambda pid, name=name: watched.update({name: pid})  # type: ignore[attr-defined]
    first.servers["b"].has_ended = True
    first.push(5)
    other.deployment.follow(first.deployment.state)
    assert other.asked == "ac"
    assert watched == {name: ord(name) for name in "abc"}
    assert other.deployment.client.weights == ServedWeights(5, "adapter-5")
    first.servers["b"].is_ready = True
    first.push(6)
    other.deployment.follow(first.deployment.state)
    assert other.asked == "abc"
