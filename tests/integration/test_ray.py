"""Whole runs that sample from two vLLM servers at once, also while one is lost in the middle: processes of the run,
found ones, and those on the machines of a Ray cluster, which this machine is, twice.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import CPU, engine, engine_core, preloaded_python, processes_naming, save_model, writers
from fake_vllm import FakeVllm
from runs import assert_same, at, drawn, metrics_of, own_server, run, wait_until
from scripted_server import ScriptedServer

from offline_grpo.engine.ray_actor import ServerActor
from offline_grpo.errors import ConfigError

SYNC = ("weight_sync=reload", "train.iterations=3")
TWO = (*SYNC, "placement.num_engines=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one server."""
    folder = tmp_path_factory.mktemp("one")
    run(folder / "run", model, *own_server(preloaded_python(folder)), *SYNC)
    return folder / "run"


def assert_same_run(folder: Path, expected: Path) -> list[dict[str, float]]:
    """Equal, apart from logprobs, up to rounding: seeds belong to the requests. Returns the metrics of training."""
    found = metrics_of(folder)
    others = {name: {k: v for k, v in of.items() if not k.startswith("engines/")} for name, of in found.items()}
    assert_same(others, metrics_of(expected))
    assert len(drawn(expected)) == 3
    assert drawn(folder) == drawn(expected)
    trained = [found[f"train_iter_{i:03d}.json"] for i in range(3)]
    assert {(metrics["engines/num_serving"], metrics["sync/num_recoveries"]) for metrics in trained} == {(2, 0)}
    return trained


@pytest.mark.slow
def test_a_list_of_servers(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fakes = [stack.enter_context(closing(FakeVllm(model))) for _ in range(3)]
        alone, *two = [stack.enter_context(ScriptedServer(fake)).base_url for fake in fakes]
        run(tmp_path / "one", model, *at(alone), *SYNC)
        run(tmp_path / "run", model, *at(f"[{','.join(two)}]"), *SYNC)
    trained = assert_same_run(tmp_path / "run", tmp_path / "one")
    assert all(1 <= metrics["engines/imbalance"] < 2 for metrics in trained)


def kill_one_that_samples(folder: Path) -> None:
    """Stop the second engine, so that what it is asked stays open, and kill it soon."""
    victim = engine_core(folder / "server_1.log")
    victim.suspend()
    threading.Timer(1.0, victim.kill).start()


@pytest.mark.slow  # three starts of a server
def test_a_death_while_sampling(model: Path, one: Path, tmp_path: Path) -> None:
    """The other one answers what was open, and the next push starts the dead one again."""
    folder = tmp_path / "run"
    mishaps = {("generate", 1): partial(kill_one_that_samples, folder)}
    run(folder, model, *own_server(preloaded_python(tmp_path)), *TWO, mishaps=mishaps)
    assert [metrics["engines/num_restarts"] for metrics in assert_same_run(folder, one)] == [0, 1, 1]
    log = (folder / "run.log").read_text()
    assert log.count("sampling continues with 1 of the servers") == 1
    assert [log.count(f"[OK] version {version}:") for version in (0, 2, 4, 6)] == [2] * 4
    assert sorted(path.name for path in folder.glob("server_*.log")) == ["server_0.log", "server_1.log", "server_2.log"]
    assert not processes_naming(str(tmp_path))
    assert not [process for log in folder.glob("server_*.log") for process in writers(log)]


def in_cluster(cluster: Any, folder: Path) -> tuple[str, ...]:
    return (*own_server(preloaded_python(folder)), *TWO, "placement=ray", f"placement.address={cluster.address}")


def lose_a_machine(cluster: Any, folder: Path) -> None:
    """Both its server and Ray on it are gone when this returns, Ray elsewhere knows it, and there is a new machine."""
    import ray

    begin_of = [
        log.read_text().splitlines()[0].partition("--port")[2].split()[0] for log in sorted(folder.glob("server_*.log"))
    ]
    cluster.remove_node(cluster.machines.pop(), allow_graceful=False)
    wait_until(lambda: sum(bool(processes_naming(port)) for port in begin_of) == 1)
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
    cluster.machines.append(cluster.add_node(num_cpus=1))


@pytest.mark.slow  # three starts of a server, and of a cluster
def test_a_machine_is_lost_and_another_one_is_found(
    cluster: Any, model: Path, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next push starts the lost server elsewhere; the run draws what it draws without Ray, and leaves nothing."""
    import ray

    folder = tmp_path / "run"
    mishaps = {("generate", 1): partial(lose_a_machine, cluster, folder)}
    run(folder, model, *in_cluster(cluster, tmp_path), mishaps=mishaps)
    assert_same_run(folder, one)
    assert not processes_naming(str(tmp_path))
    assert not list(folder.glob(".weights-*"))

    monkeypatch.setattr("offline_grpo.engine.ray_actor.SETTLE_S", 1.0)
    too_many = ("placement.num_engines=3", "train.iterations=1")
    with pytest.raises(
        ConfigError, match=r"^placement.num_engines=3: each needs a CPU core .* has room for 2 \(.*: 0 GPUs and 1 CPU,"
    ):
        run(tmp_path / "three", model, *in_cluster(cluster, tmp_path), *too_many)
    assert not ray.is_initialized()
    ray.init(cluster.address, log_to_driver=False)
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    ray.shutdown()


def test_a_cluster_that_is_not_there_is_refused_in_time(model: Path, tmp_path: Path) -> None:
    began, words = time.monotonic(), (*own_server(sys.executable), *TWO, "placement=ray")
    with pytest.raises(ConfigError, match=r"^placement.address=127.0.0.1:1: no Ray cluster .*refused\); start one"):
        run(tmp_path / "run", model, *words, "placement.address=127.0.0.1:1")
    assert time.monotonic() - began < 60  # Ray itself would try for minutes


def test_a_machine_without_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline_grpo.engine.server_engine.find_spec", lambda _: None)
    monkeypatch.setattr("platform.node", lambda: "node7")
    with pytest.raises(
        ConfigError, match=r"^node7, a machine of the Ray cluster: engine.python=null: vLLM is not inst"
    ):
        ServerActor().start(engine(CPU, python=None, api_key="ours"), "model", {}, None, tmp_path)
