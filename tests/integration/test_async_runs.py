"""Whole runs that sample while they train, beside a server that takes its time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from engines import save_model
from fake_vllm import FakeVllm
from runs import at, five, metrics_of, printed, run, run_in_child, run_in_children, wait_until, weights_of
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.seeding import derive_seed
from offline_grpo.train.update import Updater
from offline_grpo.weight_sync.proof import PROBE_PROMPT_TOKENS


class Unhurried(FakeVllm):
    """Takes `delay_s` for a request of the run, while others come in, and does what /pause and /resume say.
    `at_request` may do harm.
    """

    def __init__(self, folder: Path, delay_s: float = 0.0) -> None:
        super().__init__(folder)
        self.delay_s = delay_s
        self.at_request: Any = lambda number: None
        self.num_asked = 0
        self.stuck: set[int] = set()  # seeds of requests that take minutes
        self._goes = threading.Event()
        self._goes.set()
        self.is_over = threading.Event()

    def close(self) -> None:
        self.is_over.set()
        self._goes.set()
        super().close()

    def __call__(self, request: Request) -> Reply:
        if request.path == "/pause":
            self._goes.clear()
        if request.path == "/resume":
            self._goes.set()
        if request.path == "/generate_tokens" and len(request.body["prompt"]["prompt_token_ids"]) < PROBE_PROMPT_TOKENS:
            self.num_asked += 1
            self.at_request(self.num_asked)
            is_stuck = request.body["seed"] in self.stuck
            if self.is_over.wait(600.0 if is_stuck else self.delay_s):
                return Reply()  # nobody waits for it any more, and other tests count what a model does
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
    return {
        name: {key: value for key, value in found.items() if not key.startswith("async/")}
        for name, found in metrics.items()
    }


@pytest.mark.slow
def test_without_staleness_every_file_is_that_of_on_policy(model: Path, tmp_path: Path) -> None:
    found = []
    for mode in ("mode=sync", "mode=async rollouts.max_staleness=0"):
        with unhurried(model) as (_, server):
            folder = tmp_path / mode[5:9]
            words = ("train.iterations=3", "checkpoint.enabled=true", "checkpoint.save_interval=2", *mode.split())
            run(folder, model, *server, *words)
            found.append((apart_from_async(metrics_of(folder)), weights_of(folder), record_of(folder)))
    assert found[0] == found[1]
    metrics, weights, record = found[0]
    assert (len(metrics), len(weights), len(record)) == (6, 2, 3)
    assert len({metrics[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(3)}) > 1


SIX = ("train.iterations=6", "eval.enabled=false", "checkpoint.keep_best=null")
AHEAD = ("mode=async", "rollouts.max_staleness=4", *SIX)
"""Two iterations ahead, of two updates each."""


def seeds_from(iteration: int) -> set[int]:
    """Of all requests from this iteration on."""
    return {derive_seed(0, "rollout", position) for position in range(4 * iteration, 24)}


def prompts_of(folder: Path) -> list[list[str]]:
    return [[row["problem_id"] for row in rows] for rows in record_of(folder)]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The problems of each iteration of the run that samples, then trains."""
    folder = tmp_path_factory.mktemp("on_policy")
    with unhurried(model) as (_, server):
        run(folder, model, *server, *SIX)
    return prompts_of(folder)


def assert_bounded(folder: Path, expected: list[list[str]]) -> dict[str, dict[str, float]]:
    """Every problem was trained on once, in its place, and no token was older than allowed."""
    metrics = metrics_of(folder)
    assert prompts_of(folder) == expected
    assert 0 < max(found["async/age_max"] for found in metrics.values()) <= 4
    for iteration, rows in enumerate(record_of(folder)):
        assert all(0 <= 2 * iteration - version <= 4 for row in rows for version in [row["version"]])
    return metrics


@pytest.mark.slow
def test_weights_that_a_restarted_server_lacks_are_not_sampled_from(
    model: Path, expected: list[list[str]], tmp_path: Path
) -> None:
    """While the trainer trains: it gets them again, and what was sampled from its own is thrown away."""
    with unhurried(model, 0.05) as (script, server):

        def start_anew(number: int) -> None:
            if number == 18:  # of the fourth iteration or so
                script.model.load_state_dict(start)
                script.worker.grpo_set_tag(tag=None)

        start = {name: value.clone() for name, value in script.model.state_dict().items()}
        script.at_request = start_anew
        run(tmp_path / "run", model, *server, *AHEAD)
    metrics = assert_bounded(tmp_path / "run", expected)
    assert metrics["train_iter_005.json"]["sync/num_recoveries"] == 1
    assert sum(found["async/num_discarded"] for found in metrics.values()) > 0


@pytest.mark.slow
def test_killed_while_it_trains_it_goes_on_with_what_comes_next(
    model: Path, expected: list[list[str]], tmp_path: Path
) -> None:
    saved = ("checkpoint.enabled=true", "checkpoint.save_interval=1")
    mishaps = {("train", 2): partial(signal.raise_signal, signal.SIGKILL)}
    with unhurried(model, 0.02) as (_, server):
        words = (*five(model), *server, *AHEAD, *saved)
        code = run_in_child(tmp_path / "run", *words, mishaps=mishaps)
        assert code == -signal.SIGKILL
        assert run_in_child(tmp_path / "again", *words, f"resume={tmp_path / 'run'}") == 0, printed(tmp_path / "again")
    assert_bounded(tmp_path / "run", expected)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "number", "code"), [("generate", 2, 2), ("train", 15, 15)])
def test_a_signal_stops_it_at_once(phase: str, number: int, code: int, model: Path, tmp_path: Path) -> None:
    """Though the server would take longer than the test for what it was asked."""
    with unhurried(model) as (script, server):
        script.stuck = seeds_from(2)
        mishap = {(phase, 1): partial(signal.raise_signal, number)}
        assert run_in_child(tmp_path / "run", *five(model), *server, *AHEAD, mishaps=mishap) == 128 + code


@pytest.mark.slow
def test_an_error_of_the_trainer_leaves_no_thread(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such thing")

    def ours() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if "_settle" in thread.name or "requests to" in thread.name]

    before = set(threading.enumerate())
    monkeypatch.setattr(Updater, "run", fail)
    with unhurried(model) as (script, server):
        script.stuck, began = seeds_from(1), time.monotonic()
        with pytest.raises(ValueError, match="no such thing"):
            run(tmp_path / "run", model, *server, *AHEAD)
        assert time.monotonic() - began < 300, "it waited for what it had asked"
    wait_until(lambda: not ours(), 60, lambda: str(ours()))


@pytest.mark.slow
def test_two_processes(model: Path, expected: list[list[str]], tmp_path: Path) -> None:
    with unhurried(model, 0.02) as (_, server):
        codes = run_in_children(2, tmp_path / "run", *five(model), *server, *AHEAD)
    assert codes == [0, 0], printed(tmp_path / "run")
    assert_bounded(tmp_path / "run", expected)
