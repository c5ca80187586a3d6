"""A run in two processes, which add up their gradients through NCCL, and a server on a GPU of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import save_served
from factories import compose_config
from runs import SMALL, metrics_of, printed, run_in_child, weights_of

from offline_grpo.run import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", ["", "train.sequence_parallel=2", "train.sequence_parallel=2 train.sharding=fsdp2"])
def test_two_processes_follow_the_trajectory_of_one(words: str, tmp_path: Path) -> None:
    overrides = [*SMALL, "train.precision=fp32", f"cache_dir={tmp_path}/cache", "data.problems_per_iteration=5"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert run_in_child(alone, *overrides, fresh=True) == 0, printed(alone)
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command = [*accelerate, str(ROOT / "run_grpo.py"), *overrides, *words.split(), f"hydra.run.dir={together}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout + done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("run folder:") == 1
    expected, found = metrics_of(alone), metrics_of(together)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-3, rel=1e-2), name
    assert expected["train_iter_003.json"]["grad_norm"] > 0
    assert weights_of(together).keys() == weights_of(alone).keys()


def test_the_reference_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    overrides = (*SMALL, "train.precision=bf16", "train.kl_coef=0.1", "train.lr=1e-3", f"cache_dir={tmp_path}/cache")
    found = []
    for policy, reference in (("cuda:0", "null"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        run = tmp_path / f"{policy}_{reference}"
        train(compose_config(*overrides, f"model.device={policy}", f"model.ref_device={reference}"), run)
        metrics = metrics_of(run)["train_iter_003.json"]
        found.append(metrics["kl_divergence"])
        assert metrics["alignment/diff_abs_mean"] < 0.05
        log = (run / "run.log").read_text()
        assert ("GPU 1: predicted to hold" in log) is (len(found) > 1)
        assert "without CUDA graphs" not in log
    assert found[0] > 0
    assert found[1:] == pytest.approx([found[0]] * 2, rel=0.2)


@pytest.mark.parametrize(("composite", "quantization"), [(None, "null"), ("gemma3", "null"), (None, "fp8")])
def test_nccl_reaches_a_server_on_the_other_gpu(composite: str | None, quantization: str, tmp_path: Path) -> None:
    """Of a composite the text alone: its tower is where it was."""
    server = (
        *("generation=vllm_server", "weight_sync=nccl", "engine.args.gpu_memory_utilization=0.1"),
        *("engine.args.enforce_eager=true", f"+engine.args.quantization={quantization}"),
        "+engine.args.kv_cache_memory_bytes=1073741824",
    )
    overrides = (*SMALL, "model.tiny.hidden_size=128", "train.precision=bf16", f"cache_dir={tmp_path}/cache")
    if composite is not None:
        overrides += (f"model.train_id={save_served(composite, tmp_path / 'model', torch.bfloat16)}",)
    train(compose_config(*overrides, *server), tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")
    for iteration in range(4):
        found = metrics[f"train_iter_{iteration:03d}.json"]
        assert found["sync/version"] == 2 * (iteration + 1)
        assert found["sync/num_bytes"] > 0
        proven, all_tensors = found["sync/num_tensors_proven"], found["sync/num_tensors"]
        assert 0 < proven < all_tensors if quantization == "fp8" else proven == all_tensors > 0
        assert found["alignment/diff_abs_mean"] < (0.3 if quantization == "fp8" else 0.05)
