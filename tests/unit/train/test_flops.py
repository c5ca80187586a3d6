"""Operations of an update, against sums by hand and torch's own count."""

from __future__ import annotations

import pytest
import torch
from architectures import ZOO
from factories import make_llama, make_qwen2
from torch.utils.flop_counter import FlopCounterMode

from offline_grpo.train.flops import peak_flops, update_flops

BLOCK = 4 * 32 * 32 + 3 * 32 * 48  # q, k, v and o; gate, up and down


def test_by_hand() -> None:
    model = make_llama()  # 2 blocks, 4 heads of 8, an output head of its own
    matrices = 2 * BLOCK + model.config.vocab_size * 32
    assert update_flops(model, [10, 3]) == 6 * matrices * 13 + 12 * 2 * 4 * 8 * (100 + 9) / 2


def test_frozen_weights_get_no_gradient() -> None:
    model = make_llama()
    whole = update_flops(model, [10])
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    assert whole - update_flops(model, [10]) == 2 * BLOCK * 10


def test_it_is_what_torch_counts() -> None:
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
    assert 0 < 6 * experts * (1 - chosen / config.num_experts) * 10 == pytest.approx(update_flops(model, [10]) - before)


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_has_a_count(name: str) -> None:
    """A mixture of experts and a model without attention too."""
    model = ZOO[name].build()
    assert update_flops(model, [10, 3]) >= 4 * model.get_output_embeddings().weight.numel() * 13


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
