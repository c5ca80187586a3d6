"""An evaluation that was owed may be the one that ends the run: it has the mark then, as the iteration before it was
logged without.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.interrupt import StopSignal
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.loop import Evaluation, Loop
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.push_schedule import PushSchedule
from offline_grpo.types import RolloutGroup, SyncReport


class Listener:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, int, float | None]] = []

    def rollouts(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, name: str, metrics: Any, *, iteration: int) -> None:
        self.logged.append((name, iteration, metrics.get("stopped_early")))


def make_loop(listener: Listener, *, iterations: int) -> Loop:
    """One that stops at a pass@1 of 0.5, and measures just that."""
    unused: Any = None
    report = SyncReport(version=7, num_tensors=0, num_bytes=0, seconds=0.0, paused_seconds=0.0)
    client = SimpleNamespace(engine_name="vLLM")
    deployment: Any = SimpleNamespace(
        client=client, is_frozen=False, push=lambda *_, **__: report, check_served=lambda: None
    )
    groups = [RolloutGroup(None, ())]
    evaluator: Any = SimpleNamespace(sample=lambda *_, **__: groups, metrics=lambda *_, **__: {"pass@1": 0.5})
    return Loop(
        config=SimpleNamespace(iterations=iterations),  # type: ignore[arg-type]
        policy=SimpleNamespace(compute_device=torch.device("cpu")),  # type: ignore[arg-type]
        source=SimpleNamespace(weights_changed=lambda _: None, start=lambda *_: None),  # type: ignore[arg-type]
        updater=SimpleNamespace(counters=SimpleNamespace(version=7)),  # type: ignore[arg-type]
        deployment=deployment,
        schedule=PushSchedule(interval=1),
        evaluation=Evaluation(evaluator=evaluator, deployment=deployment, before_training=False, is_due=lambda _: True),
        milestones=Milestones(None, StopWhenConfig("pass@1", 0.5, None)),
        checkpointer=unused,
        save_due=lambda _: False,
        listeners=[listener],  # type: ignore[list-item]
        ranks=Ranks(use_cpu=True),
        stop=StopSignal(),
        stop_at_failed_frac=None,
        fills_updates=False,
    )


@pytest.mark.parametrize(("iterations", "mark"), [(3, 1.0), (1, None)])
def test_an_owed_evaluation_that_ends_the_run_says_so(iterations: int, mark: float | None) -> None:
    listener = Listener()
    make_loop(listener, iterations=iterations).run(1, {}, owes_evaluation=True)
    assert listener.logged == [("eval", 0, mark)]
