"""Whole runs that sample from two vLLM servers at once, also while one of them dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from engines import CPU, engine_core, make_server, preloaded_python, processes_naming, save_model, writers
from runs import assert_same, drawn, metrics_of, own_server, run

from offline_grpo.engine.server import Server

pytestmark = pytest.mark.slow  # eight starts of a server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two that nobody owns."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        found = [make_server(CPU, folder / str(i), api_key="ours", python=preloaded_python(folder)) for i in range(2)]
        for server in found:
            stack.callback(server.stop)
            server.begin(str(model))
        for server in found:
            server.start(str(model))
        yield found


def at(*servers: Server) -> tuple[str, ...]:
    urls = ",".join(server.base_url for server in servers)
    return ("generation=vllm_server", f"generation.base_url=[{urls}]", "generation.api_key=ours", "weight_sync=reload")


@pytest.fixture(scope="module")
def one(model: Path, servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one server."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(folder, model, *at(servers[0]))
    return folder


def assert_same_run(folder: Path, expected: Path) -> list[dict[str, float]]:
    """Equal, apart from logprobs, up to rounding. Returns the metrics of training."""
    found = metrics_of(folder)
    others = {
        name: {key: value for key, value in values.items() if not key.startswith("engines/")}
        for name, values in found.items()
    }
    assert_same(others, metrics_of(expected))
    assert len(drawn(expected)) == 5
    assert drawn(folder) == drawn(expected)
    return [found[f"train_iter_{i:03d}.json"] for i in range(5)]


def test_a_list_of_servers(model: Path, servers: list[Server], one: Path, tmp_path: Path) -> None:
    """Seeds belong to the requests, so the record is that of one server."""
    run(tmp_path / "run", model, *at(*servers))
    trained = assert_same_run(tmp_path / "run", one)
    assert {metrics["engines/num_serving"] for metrics in trained} == {2}
    assert all(1 <= metrics["engines/imbalance"] < 2 for metrics in trained)


def kill_one_that_samples(folder: Path) -> None:
    """Stop the second engine, so that what it is asked stays open, and kill it soon."""
    victim = engine_core(folder / "server_1.log")
    victim.suspend()
    threading.Timer(1.0, victim.kill).start()


def test_a_death_while_sampling(model: Path, one: Path, tmp_path: Path) -> None:
    """The other one answers what was open, and the next push starts the dead one again."""
    folder = tmp_path / "run"
    mishaps = {("generate", 1): partial(kill_one_that_samples, folder)}
    servers = (*own_server(preloaded_python(tmp_path)), "weight_sync=reload", "placement.num_engines=2")
    run(folder, model, *servers, mishaps=mishaps)
    trained = assert_same_run(folder, one)
    assert [metrics["engines/num_restarts"] for metrics in trained] == [0, 1, 1, 1, 1]
    assert {metrics["engines/num_serving"] for metrics in trained} == {2}
    assert {metrics["sync/num_recoveries"] for metrics in trained} == {0}
    log = (folder / "run.log").read_text()
    assert log.count("sampling continues with 1 of the servers") == 1
    assert [log.count(f"[OK] version {version}:") for version in (0, 2, 4, 6, 8, 10)] == [2] * 6
    assert sorted(path.name for path in folder.glob("server_*.log")) == ["server_0.log", "server_1.log", "server_2.log"]
    assert not processes_naming(str(tmp_path))
    assert not [process for log in folder.glob("server_*.log") for process in writers(log)]
