"""What only a CUDA GPU can show of training: 16-bit formats, 8-bit and 4-bit state, state in the host's memory, and a
full card.

`pytest -m gpu tests/gpu`, on one GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from factories import LOSS, compose_config, make_qwen2, make_scoring
from runs import metrics_of
from torch import nn

from offline_grpo.errors import OutOfMemory
from offline_grpo.loss.grpo import GRPO
from offline_grpo.model.layouts import Varlen
from offline_grpo.model.masters import MasterWeights
from offline_grpo.run import train
from offline_grpo.train import optimizer as offload
from offline_grpo.train.metrics import Alignment
from offline_grpo.train.optimizer import AdamW, OffloadedAdamW
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
        *("model.device=cuda", "train.iterations=25", "eval.interval=25", "eval.num_ids=128", "logger=[json]"),
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


SHAPES = {"a": (700, 330), "bias": (5,), "b": (4000, 3100), "norm": (129,), "scalar": (), "c": (20, 33, 110)}


@pytest.mark.parametrize("chunk", [1 << 16, 1 << 25], ids=["many_chunks", "one_chunk"])
def test_steps_are_those_of_resident_state_bit_for_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_ELEMENTS", chunk)
    factory = AdamW(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-8, offload=False)
    found = []
    for offloaded in (False, True):
        generator = torch.Generator(CUDA).manual_seed(0)
        model = {
            name: nn.Parameter(torch.randn(s, generator=generator, device=CUDA).bfloat16())
            for name, s in SHAPES.items()
        }
        masters = MasterWeights(model.items(), offload=offloaded)
        optimizer = factory.create(masters.parameters.values())
        if offloaded:
            optimizer = OffloadedAdamW(optimizer, masters)
            assert masters.host is not None
            assert masters.host.flat.is_pinned(), "copies would wait for each other"
        for _ in range(5):
            for parameter in masters.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator, device=CUDA)
            optimizer.step()
            masters.publish()
        state = [value.cpu() for p in masters.parameters.values() for value in optimizer.state[p].values()]
        found.append(
            [*(p.detach().cpu() for p in model.values()), *(value.cpu() for value in masters.values.values()), *state]
        )
        assert masters.differing() == []
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


LARGE = [f"model.tiny.{shape}" for shape in ("hidden_size=1536", "intermediate_size=6144", "num_layers=4")]
LONG = (
    *("model.tiny.warm_start_steps=1", "generation.max_new_tokens=256", "eval.enabled=false"),
    *("placement.check_memory=false", "train.iterations=1", "train.drop_zero_signal_groups=false"),
)


@pytest.fixture
def little_memory():
    """As if other processes held the rest; what tests before have kept does not count."""
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.005 + kept)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("overrides", "phase"),
    [
        (
            ("generation.batch_size=16384", "data.problems_per_iteration=512", "data.rollouts_per_problem=64"),
            "generate, iteration 1",
        ),
        ((*LARGE, "generation.max_new_tokens=8"), "load model"),
    ],
)
def test_a_full_gpu_ends_the_run_in_one_line(little_memory, tmp_path, overrides, phase):
    config = compose_config("model.device=cuda", *LONG, f"cache_dir={tmp_path / 'cache'}", *overrides)
    with pytest.raises(OutOfMemory, match=rf"^out of memory in the phase {phase}: "):
        train(config, tmp_path / "run")


NF4 = (
    *("model/lora=default", "model.quantization=nf4", "model.tiny.warm_start_steps=60", "train.precision=bf16"),
    *("train.lr=3e-3", "train.iterations=3", "data.problems_per_iteration=8", "eval.num_ids=16"),
)


@pytest.mark.parametrize(
    "where",
    [
        (),
        (
            *("generation=vllm_server", "weight_sync=lora_hotswap", "engine.args.gpu_memory_utilization=0.1"),
            "+engine.args.kv_cache_memory_bytes=1073741824",
        ),
    ],
    ids=["in process", "server"],
)
def test_what_samples_has_the_numbers_that_are_trained_on(where: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    train(compose_config(*NF4, *where, f"cache_dir={tmp_path}/cache"), tmp_path / "run")
    metrics, log = metrics_of(tmp_path / "run"), (tmp_path / "run" / "run.log").read_text()
    assert all(metrics[f"train_iter_{i:03d}.json"]["alignment/diff_abs_mean"] < 0.05 for i in range(3))
    assert "decodes without CUDA graphs" not in log
    if where:
        assert "[OK] base model: 20 of 20 tensors equal bit for bit" in log
