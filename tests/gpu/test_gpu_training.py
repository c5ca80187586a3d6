"""What only a CUDA GPU can show: 16-bit training, 8-bit optimizer state. `pytest -m gpu tests/gpu`, on one GPU."""

import json

import pytest
import torch
from factories import LOSS, compose_config, make_qwen2, make_scoring

from offline_grpo.loss.grpo import GRPO
from offline_grpo.model.layouts.varlen import Varlen
from offline_grpo.run import train
from offline_grpo.train.metrics import Alignment
from offline_grpo.types import BatchTotals

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_no_microbatch_waits_for_the_device(token_batch):
    scoring = make_scoring(make_qwen2(hidden_size=128).to(CUDA, torch.bfloat16), Varlen())
    try:
        for mode in ("default", "error"):  # the first time kernels are loaded
            torch.cuda.set_sync_debug_mode(mode)
            part = token_batch.to(CUDA)
            stats = scoring(part)
            loss = GRPO(**LOSS)(stats, part.with_logprobs(old=stats.logprobs.detach()), BatchTotals(100, 12, 20)).loss
            loss.backward()
            Alignment().add(part, stats.logprobs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.precision=fp32"],
        ["train.precision=bf16"],
        ["train.precision=fp16"],
        ["train.precision=bf16", "train/optimizer=adamw_8bit"],
        ["train.precision=bf16", "train/optimizer=adamw_8bit", "train.optimizer.paged=true"],
        ["train.precision=bf16", "model/lora=default", "train.gradient_checkpointing=true", "train.lr=3e-3"],
    ],
    ids=["fp32", "bf16", "fp16", "adamw_8bit", "paged", "lora"],
)
def test_the_tiny_model_learns(overrides, tmp_path):
    if "train/optimizer=adamw_8bit" in overrides:
        pytest.importorskip("bitsandbytes")
    small = [
        "model.device=cuda",
        "train.iterations=25",
        "eval.interval=25",
        "eval.num_ids=128",
        "logger=[json]",
        "checkpoint.save_interval=0",
    ]
    cache = f"cache_dir={tmp_path.parent}/cache"
    train(compose_config(*small, cache, *overrides), tmp_path / "run")
    before = json.loads((tmp_path / "run" / "metrics" / "eval_init.json").read_text())["pass@1"]
    after = json.loads((tmp_path / "run" / "metrics" / "eval_iter_024.json").read_text())["pass@1"]
    metrics = json.loads((tmp_path / "run" / "metrics" / "train_iter_000.json").read_text())
    print(f"{overrides}: pass@1 {before:.3f} -> {after:.3f}, {metrics}")
    assert before < 0.6
    assert after > before + 0.1
    assert metrics["alignment/diff_abs_mean"] < 0.05
