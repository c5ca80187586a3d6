"""Servers on the machines of a Ray cluster: two on this one, which Ray takes for machines. One of them is lost in the
middle of a run.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import CPU, engine, preloaded_python, processes_naming, save_model
from runs import assert_same, drawn, metrics_of, own_server, run, wait_until

from offline_grpo.engine.ray_server import ServerActor
from offline_grpo.errors import ConfigError

TWO = ("weight_sync=reload", "placement.num_engines=2")
THREE = "train.iterations=3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


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


@pytest.mark.slow  # four starts of a server, and of a cluster
def test_a_machine_is_lost_and_another_one_is_found(cluster: Any, model: Path, tmp_path: Path) -> None:
    """The next push starts the lost server elsewhere; the run draws what it draws without Ray, and leaves nothing."""
    import ray

    expected, folder = tmp_path / "expected", tmp_path / "run"
    run(expected, model, *own_server(preloaded_python(tmp_path)), "weight_sync=reload", THREE)
    mishaps = {("generate", 1): partial(lose_a_machine, cluster, folder)}
    run(folder, model, *in_cluster(cluster, tmp_path), THREE, mishaps=mishaps)
    found = metrics_of(folder)
    trained = [found[f"train_iter_{i:03d}.json"] for i in range(3)]
    assert [metrics["engines/num_serving"] for metrics in trained] == [2] * 3
    assert {metrics["sync/num_recoveries"] for metrics in trained} == {0}
    assert_same(
        {name: {k: v for k, v in of.items() if not k.startswith("engines/")} for name, of in found.items()},
        metrics_of(expected),
    )
    assert drawn(folder) == drawn(expected)
    assert not processes_naming(str(tmp_path))
    assert not list(folder.glob(".weights-*"))

    too_many = ("placement.num_engines=3", "train.iterations=1")
    with pytest.raises(
        ConfigError, match=r"^placement.num_engines=3: each needs a CPU core .* has room for 2 \(.*: 0 GPUs and 1 CPU,"
    ):
        run(tmp_path / "three", model, *in_cluster(cluster, tmp_path), *too_many)
    assert not ray.is_initialized()
    ray.init(cluster.address, log_to_driver=False)
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    ray.shutdown()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["placement.address=127.0.0.1:1"], r"^placement.address=127.0.0.1:1: no Ray cluster .*refused\); start one"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_in_time(
    words: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", model, *own_server(sys.executable), *TWO, "placement=ray", *words)
    assert time.monotonic() - began < 60  # Ray itself would try for minutes


def test_a_machine_without_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline_grpo.engine.launcher.find_spec", lambda _: None)
    monkeypatch.setattr("platform.node", lambda: "node7")
    with pytest.raises(
        ConfigError, match=r"^node7, a machine of the Ray cluster: engine.python=null: vLLM is not inst"
    ):
        ServerActor().start("model", engine(CPU, python=None, api_key="ours"), tmp_path, {}, {})
