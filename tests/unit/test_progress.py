"""What is said about progress reaches the listeners of the run, and what a start consists of is measured."""

import re
import time
from typing import Any

import pytest

from offline_grpo import progress
from offline_grpo.interfaces import RunListener


class Heard(RunListener):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def phase(self, name: str, iteration: int) -> None:
        self.events.append((name, iteration))

    def progress(self, done: int, total: int, unit: str) -> None:
        self.events.append((done, total, unit))


class Clock:
    """In place of the module `time`: a busy machine does not change what a step took."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def time(self) -> float:
        return self.now_s

    perf_counter = time

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_listeners_hear_of_phases_and_of_how_far_they_are() -> None:
    heard = Heard()
    with progress.followed():
        with progress.phase("load data"):
            progress.report(1, 2, "files")  # nobody listens yet
        progress.tell([heard])
        with progress.phase("generate", 3):
            progress.report(5, 8, "completions")
            with progress.phase("start server"):
                pass
            progress.report(6, 8, "completions")
    progress.report(7, 8, "completions")
    with progress.phase("train", 3):
        pass
    assert heard.events == [
        ("generate", 3),
        (5, 8, "completions"),
        ("start server", -1),
        ("generate", 3),
        (6, 8, "completions"),
    ]


def test_what_the_start_took(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    assert progress.start_metrics() == {"time/start_s": 0.0}, "not in a run"
    with progress.followed():
        with progress.step("load model", "loading"):
            clock.pass_by(0.05)
        with progress.phase("load model"):
            clock.pass_by(0.05)
        caplog.set_level("INFO")
        found = progress.start_metrics()
    assert re.fullmatch(r"ready after \d+\.\d s: .*load model 0\.1.*", caplog.messages[-1])
    assert found.keys() == {"time/start_s", "time/start_imports_and_data_s", "time/start_load_model_s"}
    assert found["time/start_load_model_s"] == pytest.approx(0.1, abs=1e-4)
    assert found["time/start_s"] == pytest.approx(
        found["time/start_imports_and_data_s"] + found["time/start_load_model_s"], abs=1e-4
    )
