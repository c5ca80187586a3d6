"""FlashAttention 4 against dense attention in float32, and in a model with heads of a real size."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import long_batch
from factories import make_scoring
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from offline_grpo.model.layouts.varlen import Flash4, Varlen, _flash4_kernel, has_flash4
from offline_grpo.model.proof import settle_compile, settle_layout

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_flash4(CUDA, torch.bfloat16), reason="no flash-attn-4, or no GPU that it is for"),
]

LENGTHS = (1, 300, 129, 128, 17, 640)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    per_group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(per_group, dim=1) for x in (k, v))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(CUDA)
    distance = torch.arange(len(q), device=CUDA)[:, None] - torch.arange(len(q), device=CUDA)
    seen = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or len(q)))
    scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (14, 2, 64), (8, 8, 96), (4, 1, 256)])
def test_it_is_dense_attention_within_sequences(heads: int, kv_heads: int, size: int, window: int | None) -> None:
    torch.manual_seed(0)
    total, scale = sum(LENGTHS), 0.7 / size**0.5

    def leaf(count: int) -> Tensor:
        return torch.randn(total, count, size, device=CUDA).bfloat16().requires_grad_()

    q, k, v = leaf(heads), leaf(kv_heads), leaf(kv_heads)
    grad = torch.randn(total, heads, size, device=CUDA)
    boundaries = torch.tensor((0, *LENGTHS), device=CUDA).cumsum(0).int()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    right = dense(*wide, scale, window)
    expected = torch.autograd.grad(right, wide, grad)
    found = _flash4_kernel(q, k, v, boundaries, max(LENGTHS), scale, window)
    gradients = torch.autograd.grad(found, (q, k, v), grad.bfloat16())
    for name, a, b in zip("oqkv", (found, *gradients), (right, *expected), strict=True):
        error = ((a.float() - b).norm() / b.norm()).item()
        print(f"{heads}/{kv_heads} x {size}, window {window}: {name} {error:.1e}")
        assert error < 0.01, name


def test_auto_takes_it_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 128}
    torch.manual_seed(0)
    with CUDA:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).bfloat16()
    scoring = make_scoring(model)
    settle_layout(scoring, None, CUDA)
    assert type(scoring.layout) is Flash4
    with caplog.at_level(logging.INFO):
        settle_compile(scoring, True, CUDA)
    batch = long_batch().to(CUDA)
    batch.token_ids.clamp_(max=511)
    found = scoring.logprobs(batch)
    scoring.layout = Varlen()
    expected = scoring.logprobs(batch)
    mask = batch.completion_mask
    error = ((found - expected)[mask].square().mean().sqrt() / expected[mask].std()).item()
    print(f"relative error {error:.1e}")
    assert error < 0.02
