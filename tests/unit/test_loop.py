"""The loop gives up after a second death, pushes when it is due, and lets nothing count before it is complete.

A death that it recovers from is in tests/integration/test_server_deaths.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import make_group

from offline_grpo import loop
from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.history.signals import StopSignal
from offline_grpo.loop import Loop, train
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.schedule import Milestones
from offline_grpo.types import SyncReport

GROUP: Any = SimpleNamespace(rollouts=(), with_failures=lambda _: GROUP)


def report_of(version: int) -> SyncReport:
    return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)


class Engine:
    """Dies at the first `num_deaths` pushes."""

    client = SimpleNamespace(is_local=False)
    is_frozen = False

    def __init__(self, num_deaths: int = 0, error: type[Exception] = EngineDied) -> None:
        self.num_deaths = num_deaths
        self.error = error
        self.calls: list[Any] = []
        self.losses: list[EngineError] = []

    def push(self, policy: Any, *, version: int, amid_requests: bool = False, is_recovery: bool = False) -> SyncReport:
        self.calls.append(("recover" if is_recovery else "push", version))
        if is_recovery:
            return report_of(version)
        if self.calls.count(self.calls[-1]) <= self.num_deaths:
            raise self.error("the server has ended (exit code 1).")
        return report_of(version)

    def check_served(self) -> None:
        self.calls.append("check_served")
        if self.losses:
            raise self.losses.pop()

    def metrics(self) -> dict[str, float]:
        return {}


def make_run(engine: Engine, *, interval: int = 1, iterations: int = 1, **parts: Any) -> Any:
    source = SimpleNamespace(
        weights_changed=lambda version: engine.calls.append(("changed", version)),
        weights_lost=lambda: None,
        samples_ahead=False,
        start=lambda *_: [],
    )
    values: dict[str, Any] = {
        "config": SimpleNamespace(
            train=SimpleNamespace(iterations=iterations), scoring=SimpleNamespace(stop_at_failed_frac=None)
        ),
        "plan": SimpleNamespace(weight_sync=SimpleNamespace(interval=interval)),
        "policy": SimpleNamespace(compute_device=torch.device("cpu")),
        "source": source,
        "updater": SimpleNamespace(counters=SimpleNamespace(version=7)),
        "training": engine,
        "milestones": Milestones(None, StopWhenConfig("pass@1", None, None)),
        "listeners": [],
        "ranks": Ranks(use_cpu=True),
        "stop": StopSignal(),
    }
    return SimpleNamespace(**(values | parts))


def make_loop(engine: Engine, **parts: Any) -> Loop:
    return Loop(make_run(engine, **parts))


PUSH, RECOVER, CHANGED = ("push", 7), ("recover", 7), ("changed", 7)


def test_a_second_death_or_other_weights_end_the_run() -> None:
    engine = Engine(2)
    with pytest.raises(EngineDied):
        make_loop(engine).push(force=False)
    assert engine.calls == [PUSH, RECOVER, CHANGED, PUSH]
    engine = Engine(1, EngineError)
    with pytest.raises(EngineError):
        make_loop(engine).push(force=False)
    assert engine.calls == [PUSH]
    engine = Engine()
    engine.losses = [EngineError("something else pushes")]
    with pytest.raises(EngineError, match="something else"):
        make_loop(engine).sample(engine, lambda: ["groups"])  # type: ignore[arg-type]
    assert engine.calls == ["check_served"]


def test_every_third_opportunity_to_push_is_taken_and_an_evaluation_begins_anew() -> None:
    engine = Engine()
    loop = make_loop(engine, interval=3)
    for force in (False, False, False, True, False, False, False):
        loop.push(force=force)
        engine.calls.append("iteration")
    assert [call for call in engine.calls if call[0] != "changed"] == [
        *("iteration", "iteration", PUSH, "iteration", PUSH, "iteration", "iteration", "iteration", PUSH, "iteration"),
    ]


@pytest.mark.parametrize(("iterations", "mark"), [(3, 1.0), (1, None)])
def test_an_evaluation_that_was_cut_short_comes_first_and_may_end_the_run(iterations: int, mark: float | None) -> None:
    """It has the mark then, as the iteration before it was logged without."""
    engine, logged, commits = Engine(), list[Any](), list[int]()
    listener = SimpleNamespace(
        rollouts=lambda *_, **__: None,
        log=lambda name, metrics, iteration: logged.append((name, iteration, metrics.get("stopped_early"))),
    )
    run = make_run(
        engine,
        iterations=iterations,
        evaluation=engine,
        evaluator=SimpleNamespace(sample=lambda *_, **__: [GROUP], metrics=lambda *_, **__: {"pass@1": 0.5}),
        milestones=Milestones(None, StopWhenConfig("pass@1", 0.5, None)),
        listeners=[listener],
        checkpointer=SimpleNamespace(write=lambda _: None, commit=commits.append),
        folder=SimpleNamespace(misses_evaluation=lambda _: True),
        restored=SimpleNamespace(iteration=0, source={}),
    )
    run.config.eval = SimpleNamespace(eval_first=False)
    train(run)
    assert logged == [("eval", 0, mark)]
    assert commits == [0]


def test_a_checkpoint_is_written_before_the_metrics_and_counts_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed in between repeats the iteration: none that counts lacks its metrics."""
    events: list[Any] = []
    saved = SimpleNamespace(write=lambda i: events.append(("write", i)), commit=lambda i: events.append(("commit", i)))
    listener = SimpleNamespace(
        log=lambda name, _, iteration: events.append((name, iteration)), rollouts=lambda *_, **__: None
    )
    nothing = SimpleNamespace(metrics={}, groups=[], advantages=[], batch=None)
    monkeypatch.setattr(loop, "prepare_batch", lambda *_, **__: nothing)
    run = make_run(Engine(), iterations=2, checkpointer=saved, listeners=[listener], evaluator=None, restored=None)
    run.config.scoring.on_failure, run.config.checkpoint = "exclude", SimpleNamespace(save_interval=1)
    run.source.next, run.source.metrics = lambda _: [make_group(("4", 1.0), ("5", 0.0))], dict
    run.source.sampled, run.config.data = lambda *_: None, SimpleNamespace(resample_zero_signal=False)
    run.updater.passes, run.policy.num_trainable = None, 1
    iterations = Loop(run)
    for iteration in range(2):
        iterations.iterate(iteration)
    assert events == [(name, i) for i in (0, 1) for name in ("write", "train", "commit")]
