"""Whole runs against real vLLM servers on the CPU: a server that dies, a trainer that is killed, strategies that follow one trajectory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from children import SMALL, Kill, metrics_of, printed, run_in_child
from engines import CPU, LORA_ARGS, kill_engine, kill_engines, load, make_client, make_server, processes_naming, running
from factories import compose_config

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm_control import VllmControl
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.run import app
from offline_grpo.weight_sync.reload import Reload

ROOT = Path(__file__).parents[2]
OWN_SERVER = (
    "generation=vllm_server",
    "engine.args.enforce_eager=true",
    "+engine.args.distributed_executor_backend=uni",
    "+engine.args.kv_cache_memory_bytes=67108864",
    "+engine.args.max_num_batched_tokens=32768",
    "engine.args.gpu_memory_utilization=null",
    "+engine.env.OMP_NUM_THREADS=1",
    '+engine.env.VLLM_ENABLE_V1_MULTIPROCESSING="0"',
)
FIVE = (
    *SMALL,
    "model.tiny.hidden_size=128",
    "train.iterations=5",
    "eval.interval=5",
    "train.lr=1e-3",
    "checkpoint.enabled=false",
    "model.device=cpu",
)

LORA = ("model/lora=default", "train.lr=1e-2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file keep their tiny model."""
    return tmp_path_factory.mktemp("cache")


def run(folder: Path, cache: Path, *overrides: str) -> dict[str, dict[str, float]]:
    """A run in this process; its metrics."""
    app.run(compose_config(*FIVE, f"cache_dir={cache}", *overrides), folder)
    return metrics_of(folder)


def assert_same(left: dict[str, dict[str, float]], right: dict[str, dict[str, float]]) -> None:
    """Equal up to rounding, apart from what says how the weights travelled."""
    assert left.keys() == right.keys()
    for name, found in left.items():
        for key, value in found.items():
            if not key.startswith(("sync/", "alignment/", "mismatch/", "logprobs/inference")):
                assert right[name][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)


@pytest.fixture(scope="module")
def found_server(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of somebody else's, on the tiny model that the runs build."""
    folder = tmp_path_factory.mktemp("found")
    run(folder / "builds_the_model", cache, "train.iterations=1", "eval.enabled=false", "train.updates_per_iteration=1")
    [model] = cache.glob("tiny-*")
    with running(make_server(CPU, folder, options=LORA_ARGS), model) as server:
        yield server, model


def serve_again(server: Server, model: Path) -> None:
    """Give the found server the weights that it was started with."""
    sync = Reload(interval=1, pause_mode="abort", tolerance_nats=0.1, server_args={}, location="memory")
    there = Server(base_url=server.base_url, api_key=None, launcher=None, log_dir=server.log_dir)
    sync.connect(load(model, CPU), make_client(there))
    sync.push(load(model, CPU), version=0)
    sync.close()


def test_strategies_follow_one_trajectory(found_server: Any, cache: Path, tmp_path: Path) -> None:
    server, model = found_server
    results = {}
    for option in ("reload", "shared_vllm"):
        serve_again(server, model)
        results[option] = run(
            tmp_path / option, cache, "generation=vllm_server", f"generation.base_url={server.base_url}", f"weight_sync={option}"
        )
    reload, shared = results["reload"], results["shared_vllm"]
    assert len(reload) == 7  # five iterations, two evaluations
    assert_same(reload, shared)
    rewards = [reload[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(5)]
    assert len(set(rewards)) > 1
    assert [reload[f"train_iter_{i:03d}.json"]["sync/version"] for i in range(5)] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(found["alignment/diff_abs_mean"] < 1e-4 for name, found in reload.items() if name.startswith("train"))


@pytest.mark.slow  # six starts of a server
@pytest.mark.parametrize(("quick", "restarting", "overrides"), [("reload", "restart", ()), ("lora_hotswap", "lora_restart", LORA)])
def test_restarted_servers_follow_it_too(
    quick: str, restarting: str, overrides: tuple[str, ...], found_server: Any, cache: Path, tmp_path: Path
) -> None:
    server, model = found_server
    serve_again(server, model)
    there = ("generation=vllm_server", f"generation.base_url={server.base_url}", f"weight_sync={quick}")
    undisturbed = run(tmp_path / quick, cache, *there, *overrides)
    restarted = run(tmp_path / restarting, cache, *OWN_SERVER, f"weight_sync={restarting}", *overrides)
    assert len({undisturbed[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(5)}) > 1
    assert_same(undisturbed, restarted)


def test_evaluation_asks_its_own_server(found_server: Any, cache: Path, tmp_path: Path) -> None:
    """Training samples in process, evaluation from a server that gets the weights before each evaluation."""
    server, model = found_server
    serve_again(server, model)
    asked = count_requests(server)
    apart = run(
        tmp_path / "apart", cache, "eval.backend=vllm_server", f"eval.base_url={server.base_url}", "train.iterations=2", "eval.interval=2"
    )
    assert count_requests(server) - asked >= 2 * 8  # two evaluations of 4 problems, 2 replicates each
    here = run(tmp_path / "here", cache, "train.iterations=2", "eval.interval=2")
    assert_same(without_evaluations(apart), without_evaluations(here))
    assert apart["eval_iter_001.json"].keys() == here["eval_iter_001.json"].keys()
    assert apart["eval_iter_001.json"] != apart["eval_init.json"]


def without_evaluations(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: found for name, found in metrics.items() if name.startswith("train")}


def count_requests(server: Server) -> float:
    lines = server.api.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{"))


def test_a_server_that_dies_is_started_again(found_server: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it samples, and again while weights are pushed: the run goes on to the same result, and counts it."""
    server, model = found_server
    serve_again(server, model)
    three = ("weight_sync=shared_vllm", "train.iterations=3")
    undisturbed = run(tmp_path / "undisturbed", cache, "generation=vllm_server", f"generation.base_url={server.base_url}", *three)
    before = processes_naming(str(cache))
    deaths = kill_engines(monkeypatch, at_push=6)
    disturbed = run(tmp_path / "disturbed", cache, *OWN_SERVER, *three)
    assert len(deaths.pids) == 2
    assert disturbed["train_iter_002.json"]["sync/num_recoveries"] == 2
    assert_same(disturbed, undisturbed)
    assert processes_naming(str(cache)) == before
    assert "Serving the weights again" in (tmp_path / "disturbed" / "run.log").read_text()


@pytest.mark.parametrize("option", ["reload", "shared_vllm"])
def test_a_found_server_that_is_started_anew_gets_the_weights_again(
    option: str, found_server: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a push and the sampling after it: what it samples from its own weights is not trained on."""
    server, model = found_server
    two = ("generation=vllm_server", f"generation.base_url={server.base_url}", f"weight_sync={option}", "train.iterations=2")
    serve_again(server, model)
    undisturbed = run(tmp_path / "undisturbed", cache, *two)
    serve_again(server, model)
    sampled = OnPolicy.next
    anew = []

    def next_of_a_new_server(self: OnPolicy, iteration: int) -> Any:
        if iteration == 1 and not anew:
            anew.append(True)
            serve_again(server, model)
            VllmControl(server).call_worker("grpo_set_tag", tag=None)
        return sampled(self, iteration)

    monkeypatch.setattr(OnPolicy, "next", next_of_a_new_server)
    disturbed = run(tmp_path / "disturbed", cache, *two)
    assert_same(disturbed, undisturbed)
    assert disturbed["train_iter_001.json"]["sync/num_recoveries"] == 1
    assert disturbed["train_iter_001.json"]["alignment/diff_abs_mean"] < 1e-4
    assert "was started anew" in (tmp_path / "disturbed" / "run.log").read_text()


KILLS = [
    pytest.param("reload", "reload:shutil.rmtree", id="reload"),
    pytest.param("shared_vllm", "shared_vllm:SharedVllm.deliver", id="shared_vllm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("option", "where"), KILLS)
def test_a_killed_trainer_leaves_nothing(option: str, where: str, cache: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a push: no process and no shared memory outlives it."""
    processes, leftovers = processes_naming(str(cache)), set(ownerless())
    kill = Kill(f"offline_grpo.weight_sync.{where}", count=3)
    code = run_in_child(tmp_path / "run", *FIVE, f"cache_dir={cache}", *OWN_SERVER, f"weight_sync={option}", kill=kill)
    assert code == -signal.SIGKILL, printed(tmp_path / "run")
    deadline = time.monotonic() + 20
    while (set(ownerless()) - leftovers or processes_naming(str(cache)) != processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(ownerless()) - leftovers == set()
    assert processes_naming(str(cache)) == processes


def ownerless() -> list[str]:
    """Folders in shared memory whose run has ended: their names carry its pid."""
    ours = [name for name in os.listdir("/dev/shm") if name.startswith("offline-grpo-")]
    return [name for name in ours if not psutil.pid_exists(int(name.split("-")[2]))]


def start_two(folder: Path, cache: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """The run in two processes, started as the README says; what they print goes to `folder`.txt."""
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", "2"]
    command = [*accelerate, str(ROOT / "run_grpo.py"), *FIVE, f"cache_dir={cache}", *overrides, f"hydra.run.dir={folder}"]
    with Path(f"{folder}.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=folder.parent, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_processes_share_a_server_and_its_recovery(found_server: Any, cache: Path, tmp_path: Path) -> None:
    """The engine is killed at some moment of the run; the second process did not start it and learns of its death too."""
    server, model = found_server
    serve_again(server, model)
    twelve = ("weight_sync=shared_vllm", "train.iterations=12", "eval.interval=12")
    alone = run(tmp_path / "alone", cache, "generation=vllm_server", f"generation.base_url={server.base_url}", *twelve)
    together = start_two(tmp_path / "together", cache, *OWN_SERVER, *twelve)
    try:
        await_file(tmp_path / "together" / "metrics" / "train_iter_001.json", together)
        kill_engine(together.pid)
        assert together.wait(timeout=240) == 0, printed(tmp_path / "together")
    finally:
        together.terminate()
        together.wait()
    found = metrics_of(tmp_path / "together")
    assert found["train_iter_011.json"]["sync/num_recoveries"] == 1
    assert_same(alone, found)


@pytest.mark.slow
def test_two_processes_evaluate_on_one_server(found_server: Any, cache: Path, tmp_path: Path) -> None:
    server, model = found_server
    overrides = ("eval.backend=vllm_server", f"eval.base_url={server.base_url}", "train.iterations=2", "eval.interval=2")
    serve_again(server, model)
    alone = run(tmp_path / "alone", cache, *overrides)
    serve_again(server, model)
    together = start_two(tmp_path / "together", cache, *overrides)
    assert together.wait(timeout=240) == 0, printed(tmp_path / "together")
    assert_same(alone, metrics_of(tmp_path / "together"))


def await_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, printed(path.parents[1])
        assert time.monotonic() < deadline, printed(path.parents[1])
        time.sleep(0.05)
