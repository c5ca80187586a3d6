"""Whole runs that sample while they train, beside a server that takes its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from children import metrics_of, weights_of
from engines import save_model
from fake_vllm import FakeVllm
from scripted_server import Reply, Request, ScriptedServer
from served_runs import at, run


class Unhurried(FakeVllm):
    """Takes `delay_s` for a request, while others come in, and does what /pause and /resume say. `at_request` may do harm."""

    def __init__(self, folder: Path, delay_s: float = 0.0) -> None:
        super().__init__(folder)
        self.delay_s = delay_s
        self.at_request: Any = lambda number: None
        self.num_asked = 0
        self._goes = threading.Event()
        self._goes.set()

    def __call__(self, request: Request) -> Reply:
        if request.path == "/pause":
            self._goes.clear()
        if request.path == "/resume":
            self._goes.set()
        if request.path == "/generate_tokens":
            self.num_asked += 1
            self.at_request(self.num_asked)
            time.sleep(self.delay_s)
            self._goes.wait()
        return super().__call__(request)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


@contextmanager
def unhurried(model: Path, delay_s: float = 0.0) -> Iterator[tuple[Unhurried, tuple[str, ...]]]:
    """A server, and the overrides for a run beside it."""
    script = Unhurried(model, delay_s)
    with ScriptedServer(script) as web:
        try:
            yield script, (*at(web.base_url), "weight_sync=reload", "eval.interval=2")
        finally:
            script.close()


def record_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Everything that was recorded of each iteration's rollouts."""
    return [pq.read_table(file).to_pylist() for file in sorted((folder / "rollouts").glob("iter_*.parquet"))]


def apart_from_async(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: value for key, value in found.items() if not key.startswith("async/")} for name, found in metrics.items()}


def test_without_staleness_every_file_is_that_of_on_policy(model: Path, tmp_path: Path) -> None:
    found = []
    for mode in ("mode=sync", "mode=async rollouts.max_staleness=0"):
        with unhurried(model) as (_, server):
            folder = tmp_path / mode[5:9]
            run(folder, model, *server, "train.iterations=3", "checkpoint.enabled=true", "checkpoint.save_interval=2", *mode.split())
            found.append((apart_from_async(metrics_of(folder)), weights_of(folder), record_of(folder)))
    assert found[0] == found[1]
    metrics, weights, record = found[0]
    assert (len(metrics), len(weights), len(record)) == (6, 2, 3)
    assert len({metrics[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(3)}) > 1
