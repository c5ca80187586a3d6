"""Whole runs beside a vLLM server on the CPU: found or started, restarted, and strategies that follow one trajectory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import metrics_of, printed
from engines import CPU, kill_engine, serve_again
from served_runs import assert_same, at, five, own_server, run

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm_control import VllmControl

ROOT = Path(__file__).parents[2]
LORA = ("model/lora=default", "train.lr=1e-2")

pytestmark = pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session")


@pytest.fixture
def server(full_server: Server, model_folder: Path) -> Server:
    """The session's, with the saved model's weights."""
    serve_again(full_server, model_folder, CPU)
    return full_server


def test_strategies_follow_one_trajectory(server: Server, model_folder: Path, tmp_path: Path) -> None:
    results = {}
    for option in ("reload", "shared_vllm"):
        serve_again(server, model_folder, CPU)
        results[option] = run(tmp_path / option, model_folder, *at(server), f"weight_sync={option}")
    reload, shared = results["reload"], results["shared_vllm"]
    assert len(reload) == 7  # five iterations, two evaluations
    assert_same(reload, shared)
    rewards = [reload[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(5)]
    assert len(set(rewards)) > 1
    assert [reload[f"train_iter_{i:03d}.json"]["sync/version"] for i in range(5)] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(found["alignment/diff_abs_mean"] < 1e-4 for name, found in reload.items() if name.startswith("train"))


@pytest.mark.slow  # six starts of a server
@pytest.mark.parametrize(
    ("quick", "restarting", "overrides", "fixture"),
    [("reload", "restart", (), "full_server"), ("lora_hotswap", "lora_restart", LORA, "lora_server")],
)
def test_restarted_servers_follow_it_too(
    quick: str,
    restarting: str,
    overrides: tuple[str, ...],
    fixture: str,
    request: pytest.FixtureRequest,
    where: object,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    server = request.getfixturevalue(fixture)
    serve_again(server, model_folder, CPU)
    undisturbed = run(tmp_path / quick, model_folder, *at(server), f"weight_sync={quick}", *overrides)
    restarted = run(tmp_path / restarting, model_folder, *own_server(tmp_path), f"weight_sync={restarting}", *overrides)
    assert len({undisturbed[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(5)}) > 1
    assert_same(undisturbed, restarted)


def test_evaluation_asks_its_own_server(server: Server, model_folder: Path, tmp_path: Path) -> None:
    """Training samples in process, evaluation from a server that gets the weights before each evaluation."""
    asked = count_requests(server)
    two = ("train.iterations=2", "eval.interval=2")
    apart = run(tmp_path / "apart", model_folder, "eval.backend=vllm_server", f"eval.base_url={server.base_url}", *two)
    assert count_requests(server) - asked >= 2 * 8  # two evaluations of 4 problems, 2 replicates each
    here = run(tmp_path / "here", model_folder, *two)
    assert_same(without_evaluations(apart), without_evaluations(here))
    assert apart["eval_iter_001.json"].keys() == here["eval_iter_001.json"].keys()
    assert apart["eval_iter_001.json"] != apart["eval_init.json"]


def without_evaluations(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: found for name, found in metrics.items() if name.startswith("train")}


def count_requests(server: Server) -> float:
    lines = server.api.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{"))


@pytest.mark.parametrize("option", ["reload", "shared_vllm"])
def test_a_found_server_that_is_started_anew_gets_the_weights_again(
    option: str, server: Server, model_folder: Path, tmp_path: Path
) -> None:
    """Between a push and the sampling after it: what it samples from its own weights is not trained on."""

    def start_anew() -> None:
        serve_again(server, model_folder, CPU)
        VllmControl(server).call_worker("grpo_set_tag", tag=None)

    two = (*at(server), f"weight_sync={option}", "train.iterations=2")
    undisturbed = run(tmp_path / "undisturbed", model_folder, *two)
    serve_again(server, model_folder, CPU)
    disturbed = run(tmp_path / "disturbed", model_folder, *two, mishaps={("generate", 1): start_anew})
    assert_same(disturbed, undisturbed)
    assert disturbed["train_iter_001.json"]["sync/num_recoveries"] == 1
    assert disturbed["train_iter_001.json"]["alignment/diff_abs_mean"] < 1e-4
    assert "was started anew" in (tmp_path / "disturbed" / "run.log").read_text()


def start_two(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """The run in two processes, started as the README says; what they print goes to `folder`.txt."""
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", "2"]
    command = [*accelerate, str(ROOT / "run_grpo.py"), *overrides, f"hydra.run.dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with Path(f"{folder}.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=folder.parent, env=environment, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_processes_share_a_server_and_its_recovery(server: Server, model_folder: Path, tmp_path: Path) -> None:
    """The engine is killed at some moment of the run; the second process did not start it and learns of its death too."""
    twelve = ("weight_sync=shared_vllm", "train.iterations=12", "eval.interval=12")
    alone = run(tmp_path / "alone", model_folder, *at(server), *twelve)
    together = start_two(tmp_path / "together", *five(model_folder), *own_server(tmp_path), *twelve)
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
def test_two_processes_evaluate_on_one_server(server: Server, model_folder: Path, tmp_path: Path) -> None:
    overrides = ("eval.backend=vllm_server", f"eval.base_url={server.base_url}", "train.iterations=2", "eval.interval=2")
    alone = run(tmp_path / "alone", model_folder, *overrides)
    serve_again(server, model_folder, CPU)
    together = start_two(tmp_path / "together", *five(model_folder), *overrides)
    assert together.wait(timeout=240) == 0, printed(tmp_path / "together")
    assert_same(alone, metrics_of(tmp_path / "together"))


def await_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, printed(path.parents[1])
        assert time.monotonic() < deadline, printed(path.parents[1])
        time.sleep(0.05)
