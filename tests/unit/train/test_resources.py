"""Throughput and memory of an iteration; operations of an update, against sums by hand and torch's own count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from architectures import ZOO
from factories import make_llama, make_qwen2
from torch.utils.flop_counter import FlopCounterMode

from offline_grpo.train.metrics import time_metrics, update_flops, utilisation

BLOCK = 4 * 32 * 32 + 3 * 32 * 48  # q, k, v and o; gate, up and down


def test_throughput_is_over_its_own_phase_and_an_evaluation_does_not_lower_it() -> None:
    metrics = {"num_completion_tokens": 600.0, "num_tokens_trained": 400.0}
    plain = time_metrics({"generate": 2.0, "train": 1.0}, metrics)
    assert plain == {
        "time/generate_s": 2.0,
        "time/train_s": 1.0,
        "time/iteration_s": 3.0,
        "time/sampling_s": 2.0,
        "perf/tokens_per_s": 200.0,
        "perf/generate_tokens_per_s": 300.0,
        "perf/train_tokens_per_s": 400.0,
    }
    evaluated = time_metrics({"generate": 2.0, "train": 1.0, "eval": 9.0}, metrics)
    for name in ("generate", "train"):
        assert evaluated[f"perf/{name}_tokens_per_s"] == plain[f"perf/{name}_tokens_per_s"]
    assert evaluated["perf/tokens_per_s"] == 50.0


def test_operations_by_hand() -> None:
    model = make_llama()  # 2 blocks, 4 heads of 8, an output head of its own
    matrices = 2 * BLOCK + model.config.vocab_size * 32
    assert update_flops(model, [10, 3]) == 6 * matrices * 13 + 12 * 2 * 4 * 8 * (100 + 9) / 2


def test_operations_are_what_torch_counts() -> None:
    """Eager attention multiplies the whole square, of which causal attention needs half; nothing needs the gradient of
    the embeddings.
    """
    model = make_qwen2(attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 50, dtype=torch.int64)).logits.sum().backward()
    square = 12 * 2 * 32 * 50**2
    assert update_flops(model, [50]) == pytest.approx(counter.get_total_flops() - square / 2, rel=1e-6)


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    model = ZOO["qwen3_moe"].build()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.dim() >= 2)
    config = model.config
    chosen, before = config.num_experts_per_tok, update_flops(model, [10])
    config.num_experts_per_tok = config.num_experts
    after = update_flops(model, [10])
    assert before is not None
    assert after is not None
    assert 0 < 6 * experts * (1 - chosen / config.num_experts) * 10 == pytest.approx(after - before)


def test_heads_of_several_sizes_count_layer_by_layer() -> None:
    model = ZOO["gemma4"].build()  # 4 heads of 8 in one layer, of 16 in the other
    once, twice = update_flops(model, [10]), update_flops(model, [20])
    assert once is not None
    assert twice is not None
    assert twice - 2 * once == 12 * 4 * (8 + 16) * (20**2 - 2 * 10**2) / 2


def test_an_architecture_that_does_not_tell_its_heads_has_no_statistic() -> None:
    model = make_llama()
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)  # type: ignore[assignment]
    assert update_flops(model, [10]) is None
    assert utilisation(None, 1.0, torch.device("cpu"), 1) == {}
