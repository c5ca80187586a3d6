"""The loop goes on with a new engine after the death of one, and gives up where the next one dies of the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.interrupt import StopSignal
from offline_grpo.train.loop import Evaluation, Loop
from offline_grpo.train.push_schedule import PushSchedule
from offline_grpo.types import RolloutGroup, SyncReport

POLICY = SimpleNamespace(compute_device=torch.device("cpu"))


class Engine:
    """Dies at the first `num_deaths` pushes."""

    client = SimpleNamespace(engine_name="vLLM")
    is_frozen = False

    def __init__(self, num_deaths: int, error: type[Exception] = EngineDied) -> None:
        self.num_deaths = num_deaths
        self.error = error
        self.calls: list[Any] = []
        self.losses: list[EngineError] = []

    def push(self, policy: Any, *, version: int, amid_requests: bool = False) -> SyncReport:
        self.calls.append(("push", policy, version))
        if self.calls.count(self.calls[-1]) <= self.num_deaths:
            raise self.error("the server has ended (exit code 1).")
        return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)

    def check_served(self) -> None:
        self.calls.append("check_served")
        if self.losses:
            raise self.losses.pop()

    def recover(self, policy: Any, *, version: int) -> None:
        self.calls.append(("recover", policy, version))

    def metrics(self) -> dict[str, float]:
        return {}


def make_loop(engine: Engine, evaluation: Evaluation | None = None) -> Loop:
    unused: Any = None
    return Loop(
        config=unused,
        policy=POLICY,  # type: ignore[arg-type]
        source=SimpleNamespace(weights_changed=lambda version: engine.calls.append(("changed", version))),  # type: ignore[arg-type]
        updater=SimpleNamespace(counters=SimpleNamespace(version=7)),  # type: ignore[arg-type]
        deployment=engine,  # type: ignore[arg-type]
        schedule=PushSchedule(interval=1),
        evaluation=evaluation,
        milestones=unused,
        checkpointer=None,
        save_due=lambda _: False,
        listeners=[],
        ranks=Ranks(use_cpu=True),
        stop=StopSignal(),
        stop_at_failed_frac=None,
        fills_updates=False,
    )


PUSH, RECOVER, CHANGED = ("push", POLICY, 7), ("recover", POLICY, 7), ("changed", 7)


def test_no_death() -> None:
    engine = Engine(0)
    assert make_loop(engine)._push(force=False)["sync/num_recoveries"] == 0
    assert engine.calls == [PUSH, CHANGED]


def test_a_death_is_recovered_from_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(1)
    loop = make_loop(engine)
    assert loop._push(force=False)["sync/num_recoveries"] == 1
    assert engine.calls == [PUSH, RECOVER, CHANGED, PUSH, CHANGED]
    assert caplog.messages == ["the server has ended (exit code 1). Serving the weights again."]
    engine.calls.clear()  # another one, later in the run
    assert loop._push(force=False)["sync/num_recoveries"] == 2


def sampled(loop: Loop, engine: Engine, share: Callable[[], list[Any]]) -> list[Any]:
    return loop._sample(engine, share)  # type: ignore[arg-type]


def test_sampling_is_repeated_too() -> None:
    engine = Engine(0)
    outcomes = iter([EngineDied("gone"), ["groups"]])

    def sample() -> list[Any]:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert sampled(make_loop(engine), engine, sample) == ["groups"]
    assert engine.calls == [RECOVER, CHANGED, "check_served"]


def test_samples_of_an_engine_that_lost_the_weights_are_drawn_again() -> None:
    engine = Engine(0)
    engine.losses = [EngineDied("started anew")]
    drawn = iter([["of the base model"], ["groups"]])
    loop = make_loop(engine)
    assert sampled(loop, engine, lambda: next(drawn)) == ["groups"]
    assert engine.calls == ["check_served", RECOVER, CHANGED, "check_served"]
    assert loop._num_recoveries == 1


def test_an_evaluation_brings_its_own_engine_back() -> None:
    training, own = Engine(0), Engine(0)
    own.losses = [EngineDied("started anew")]
    group = RolloutGroup(None, ())
    evaluator: Any = SimpleNamespace(sample=lambda *_, **__: [group], metrics=lambda groups, **_: {"groups": groups})
    evaluation = Evaluation(evaluator=evaluator, deployment=own, before_training=False, is_due=lambda _: True)  # type: ignore[arg-type]
    loop = make_loop(training, evaluation)
    assert loop._evaluate(evaluation, 0) == {"groups": [group], "scoring/num_failed": 0}
    assert own.calls == [PUSH, "check_served", RECOVER, "check_served"]
    assert training.calls == []


def test_samples_of_other_weights_end_the_run() -> None:
    engine = Engine(0)
    engine.losses = [EngineError("something else pushes")]
    with pytest.raises(EngineError, match="something else"):
        sampled(make_loop(engine), engine, lambda: ["groups"])
    assert engine.calls == ["check_served"]


def test_a_second_death_ends_the_run() -> None:
    engine = Engine(2)
    with pytest.raises(EngineDied):
        make_loop(engine)._push(force=False)
    assert engine.calls == [PUSH, RECOVER, CHANGED, PUSH]


def test_an_engine_that_lives_and_fails_is_not_started_again() -> None:
    engine = Engine(1, EngineError)
    with pytest.raises(EngineError):
        make_loop(engine)._push(force=False)
    assert engine.calls == [PUSH]


def test_a_frozen_engine_has_version_0_everywhere() -> None:
    engine = Engine(0)
    engine.is_frozen = True
    engine.push = lambda policy, **_: SyncReport(version=0, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)  # type: ignore[method-assign]
    loop = make_loop(engine)
    loop._push_first()
    metrics = loop._push(force=True)
    assert (metrics["sync/version"], metrics["sync/frozen"], loop.schedule.version) == (0, 1, 0)
    engine.losses = [EngineDied("gone")]
    assert sampled(loop, engine, lambda: ["groups"]) == ["groups"]
    assert [call for call in engine.calls if call[0] == "changed"] == [("changed", 0)] * 3
