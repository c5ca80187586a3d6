"""Whole runs on one GPU next to a real vLLM server."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from engines import kill_engines, processes_naming
from factories import compose_config
from runs import SMALL, Kill, metrics_of, printed, run_in_child
from safetensors.torch import load_file

from offline_grpo.run import train

pytestmark = pytest.mark.gpu

OVERRIDES = (
    "train.precision=bf16",
    "train.lr=1e-3",
    "data.problems_per_iteration=8",
    "data.rollouts_per_problem=8",
    "eval.num_ids=16",
)

SMALL_SERVER = (
    "engine.args.enforce_eager=true",
    "engine.args.gpu_memory_utilization=0.1",
    "+engine.args.kv_cache_memory_bytes=1073741824",
)
"""Measures no memory at its start, which others on the GPU would disturb."""


def test_end_to_end(tmp_path: Path) -> None:
    """One copy of the weights, CUDA graphs on, from the first rollout to the last checkpoint."""
    run_dir = tmp_path / "run"
    small = (
        "model.tiny.warm_start_steps=60",
        "task.format_weight=0.5",
        "eval.interval=2",
        "train.iterations=4",
        "checkpoint.save_interval=2",
        "train.drop_zero_signal_groups=false",  # every iteration pushes
    )
    memory = SMALL_SERVER[1:]
    train(
        compose_config(
            "generation=vllm_server",
            "weight_sync=shared_vllm",
            *OVERRIDES,
            *small,
            *memory,
            f"cache_dir={tmp_path}/cache",
        ),
        run_dir,
    )
    metrics = metrics_of(run_dir)
    for iteration in range(4):
        found = metrics[f"train_iter_{iteration:03d}.json"]
        assert found["sync/version"] == iteration + 1
        assert found["sync/num_bytes"] == 0
        assert found["sync/num_tensors_proven"] == found["sync/num_tensors"] > 0
        assert found["alignment/diff_abs_mean"] < 0.05
    assert {"eval_init.json", "eval_iter_001.json", "eval_iter_003.json"} <= set(metrics)
    assert (run_dir / "checkpoints" / "iter_003" / "model.safetensors").exists()
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("option", "where"), [("shared_vllm", "shared_vllm:SharedVllm.deliver"), ("ipc", "weight_transfer:Ipc.send")]
)
def test_a_killed_trainer_leaves_nothing(option: str, where: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of a push: CUDA IPC has files in shared memory too, the server's or the trainer's."""
    files, processes = set(os.listdir("/dev/shm")), processes_naming(str(tmp_path))
    server = (
        "generation=vllm_server",
        f"weight_sync={option}",
        "engine.args.gpu_memory_utilization=0.2",
        "engine.args.enforce_eager=true",
    )
    overrides = (
        *SMALL,
        *OVERRIDES,
        *server,
        f"cache_dir={tmp_path}/cache",
        "checkpoint.enabled=false",
        "model.tiny.hidden_size=128",
    )
    kill = Kill(f"offline_grpo.weight_sync.{where}", count=3)
    assert run_in_child(tmp_path / "run", *overrides, kill=kill, timeout_s=200, fresh=True) == -signal.SIGKILL, printed(
        tmp_path / "run"
    )
    deadline = time.monotonic() + 30
    while (
        set(os.listdir("/dev/shm")) - files or processes_naming(str(tmp_path)) != processes
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(os.listdir("/dev/shm")) - files == set()
    assert processes_naming(str(tmp_path)) == processes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_server_that_dies_is_started_again(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory dies with it, which the trainer's parameters were; they continue in the memory of the next."""
    deaths = kill_engines(monkeypatch, at_push=6)
    server = ("generation=vllm_server", "weight_sync=shared_vllm", *SMALL_SERVER)
    run = (
        f"train.precision={precision}",
        "train.iterations=3",
        "model.tiny.hidden_size=128",
        f"cache_dir={tmp_path}/cache",
    )
    train(compose_config(*SMALL, *OVERRIDES, *server, *run), tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")
    assert len(deaths.pids) == 2
    assert metrics["train_iter_002.json"]["sync/num_recoveries"] == 2
    assert [metrics[f"train_iter_{i:03d}.json"]["sync/version"] for i in range(3)] == [2, 4, 6]
    assert all(metrics[f"train_iter_{i:03d}.json"]["alignment/diff_abs_mean"] < 0.05 for i in range(3))
    before, *after = deaths.masters
    assert after
    assert all(torch.equal(before[name], again[name]) for again in after for name in before)
    saved = load_file(tmp_path / "run" / "checkpoints" / "iter_002" / "model.safetensors")
    assert all(torch.equal(saved[name], master.to(saved[name].dtype)) for name, master in before.items())
    assert processes_naming(str(tmp_path)) == []
