"""Base weights in 4 bits on a GPU, in process and beside a vLLM server that holds them in 4 bits too."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import compose_config
from runs import metrics_of

from offline_grpo.run import train

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.gpu

OVERRIDES = (
    "model/lora=default",
    "model.quantization=nf4",
    "model.tiny.warm_start_steps=60",
    "train.precision=bf16",
    "train.lr=3e-3",
    "train.iterations=3",
    "data.problems_per_iteration=8",
    "eval.num_ids=16",
)


@pytest.mark.parametrize(
    "where",
    [
        (),
        (
            "generation=vllm_server",
            "weight_sync=lora_hotswap",
            "engine.args.gpu_memory_utilization=0.1",
            "+engine.args.kv_cache_memory_bytes=1073741824",
        ),
    ],
    ids=["in process", "server"],
)
def test_what_samples_has_the_numbers_that_are_trained_on(where: tuple[str, ...], tmp_path: Path) -> None:
    train(compose_config(*OVERRIDES, *where, f"cache_dir={tmp_path}/cache"), tmp_path / "run")
    metrics, log = metrics_of(tmp_path / "run"), (tmp_path / "run" / "run.log").read_text()
    assert all(metrics[f"train_iter_{i:03d}.json"]["alignment/diff_abs_mean"] < 0.05 for i in range(3))
    assert "decodes without CUDA graphs" not in log
    if where:
        assert "[OK] base model: 20 of 20 tensors equal bit for bit" in log
