"""Keys and values that are read once give what their copies give: against attention written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offline_grpo.generation.decoding_graph import shared_heads

KERNEL = "offline_grpo.generation.decoding_graph.scaled_dot_product_attention"


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Head by head. [B, L, heads, Dv]"""
    per_key = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        scores = scale * query[:, head] @ key[:, head // per_key].transpose(1, 2)  # [B, L, S]
        if mask is not None:
            own = mask[:, head if mask.shape[1] > 1 else 0]
            scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own
        outputs.append(scores.softmax(-1) @ value[:, head // per_key])
    return torch.stack(outputs, 2)


@pytest.mark.parametrize(
    ("mask", "length", "kv_heads"),
    [("none", 1, 1), ("bool", 1, 2), ("float", 1, 2), ("per_head", 1, 2), ("bool", 3, 2), ("bool", 1, 6)],
)
def test_attention_is_that_of_each_head_by_itself(
    mask: str, length: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 6, length, 8), torch.randn(3, kv_heads, 11, 8)
    value = torch.randn(3, kv_heads, 11, 5)
    visible = torch.rand(3, 1, length, 11) < 0.6
    visible[..., 0] = True
    floats, per_head = torch.randn(3, 1, length, 11), torch.randn(3, 6, length, 11)
    given = {"none": None, "bool": visible, "float": floats, "per_head": per_head}[mask]
    module: object = type("Attention", (), {"num_key_value_groups": 6 // kv_heads, "is_causal": False})()
    grouped = []

    def noted(query: Tensor, *rest: Tensor, **how: object) -> Tensor:
        grouped.append(query.shape)
        return attend(query, *rest, **how)

    monkeypatch.setattr(KERNEL, noted)
    with shared_heads():
        found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, given, scaling=0.3, dropout=0.0)
    torch.testing.assert_close(found, written_out(query, key, value, given, 0.3), rtol=1e-5, atol=1e-6)
    assert grouped == ([(3, kv_heads, 6 // kv_heads, 8)] if length == 1 and kv_heads < 6 and mask != "per_head" else [])
