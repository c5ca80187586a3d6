"""The loop goes on with a new engine after the death of one, and gives up where the next one dies of the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.train.loop import Loop
from offline_grpo.types import SyncReport


class Engine:
    """Dies at the first `num_deaths` pushes."""

    def __init__(self, num_deaths: int, error: type[Exception] = EngineDied) -> None:
        self.num_deaths = num_deaths
        self.error = error
        self.calls: list[Any] = []
        self.losses: list[EngineError] = []

    def push(self, policy: Any, *, version: int, force: bool = True) -> SyncReport:
        self.calls.append(("push", policy, version, force))
        if self.calls.count(self.calls[-1]) <= self.num_deaths:
            raise self.error("the server has ended (exit code 1).")
        return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)

    def check_served(self) -> None:
        self.calls.append("check_served")
        if self.losses:
            raise self.losses.pop()

    def recover(self, policy: Any, *, version: int) -> None:
        self.calls.append(("recover", policy, version))


def make_loop(engine: Engine) -> Loop:
    unused: Any = None
    return Loop(
        config=unused,
        policy="policy",  # type: ignore[arg-type]
        source=unused,
        updater=SimpleNamespace(counters=SimpleNamespace(version=7)),  # type: ignore[arg-type]
        weight_sync=engine,  # type: ignore[arg-type]
        eval_client=unused,
        eval_sync=None,
        evaluator=None,
        checkpointer=None,
        loggers=[],
        ranks=unused,
        stop=unused,
        temperature=1.0,
        eval_first=False,
        eval_due=lambda _: False,
        save_due=lambda _: False,
    )


PUSH, RECOVER = ("push", "policy", 7, False), ("recover", "policy", 7)


def test_no_death() -> None:
    engine = Engine(0)
    assert make_loop(engine)._push(force=False)["sync/num_recoveries"] == 0
    assert engine.calls == [PUSH]


def test_a_death_is_recovered_from_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(1)
    loop = make_loop(engine)
    assert loop._push(force=False)["sync/num_recoveries"] == 1
    assert engine.calls == [PUSH, RECOVER, PUSH]
    assert caplog.messages == ["the server has ended (exit code 1). Serving the weights again."]
    engine.calls.clear()  # another one, later in the run
    assert loop._push(force=False)["sync/num_recoveries"] == 2


def test_sampling_is_repeated_too() -> None:
    engine = Engine(0)
    outcomes = iter([EngineDied("gone"), "groups"])

    def sample() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert make_loop(engine)._sampled(engine, sample) == "groups"  # type: ignore[arg-type]
    assert engine.calls == [RECOVER, "check_served"]


def test_samples_of_an_engine_that_lost_the_weights_are_drawn_again() -> None:
    engine = Engine(0)
    engine.losses = [EngineDied("started anew")]
    drawn = iter(["of the base model", "groups"])
    loop = make_loop(engine)
    assert loop._sampled(engine, lambda: next(drawn)) == "groups"  # type: ignore[arg-type]
    assert engine.calls == ["check_served", RECOVER, "check_served"]
    assert loop._num_recoveries == 1


def test_an_evaluation_brings_its_own_engine_back() -> None:
    training, own = Engine(0), Engine(0)
    own.losses = [EngineDied("started anew")]
    loop = make_loop(training)
    loop.evaluator, loop.eval_sync = SimpleNamespace(evaluate=lambda *_, **__: {"pass@1": 1.0}), own  # type: ignore[assignment]
    assert loop._evaluate(0) == {"pass@1": 1.0}
    assert own.calls == [("push", "policy", 7, True), "check_served", RECOVER, "check_served"]
    assert training.calls == []


def test_samples_of_other_weights_end_the_run() -> None:
    engine = Engine(0)
    engine.losses = [EngineError("something else pushes")]
    with pytest.raises(EngineError, match="something else"):
        make_loop(engine)._sampled(engine, lambda: "groups")  # type: ignore[arg-type]
    assert engine.calls == ["check_served"]


def test_a_second_death_ends_the_run() -> None:
    engine = Engine(2)
    with pytest.raises(EngineDied):
        make_loop(engine)._push(force=False)
    assert engine.calls == [PUSH, RECOVER, PUSH]


def test_an_engine_that_lives_and_fails_is_not_started_again() -> None:
    engine = Engine(1, EngineError)
    with pytest.raises(EngineError):
        make_loop(engine)._push(force=False)
    assert engine.calls == [PUSH]
