"""Rounding as FP8 servers do, compared with a table of all numbers that e4m3 has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from factories import make_llama
from torch import nn

from offline_grpo.model.adapters import with_lora
from offline_grpo.model.quantization import fp8_linears
from offline_grpo.settings import LoraConfig

IDS = torch.arange(3, 19).view(2, 8)
POSITIVE = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
TABLE = torch.tensor(sorted({sign * value for value in POSITIVE[:-1] for sign in (1, -1)}), dtype=torch.float64)
"""OCP 8-bit floating point: 4 bits of exponent with bias 7, 3 of mantissa, no infinity; the last one would be NaN."""


def nearest(x: torch.Tensor) -> torch.Tensor:
    """In a table whose largest number is the largest of each row."""
    scale = x.double().abs().amax(-1, keepdim=True) / 448
    at = ((x.double() / scale)[..., None] - TABLE).abs().argmin(-1)
    return (TABLE[at] * scale).float()


@pytest.mark.parametrize("is_adapted", [False, True])
def test_linear_layers_round_weights_and_inputs_and_nothing_else(is_adapted: bool) -> None:
    model: Any = make_llama()
    if is_adapted:
        model = with_lora(model, LoraConfig(4, 8, 0.0, ["all-linear"], None), adapter=None)
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    expected = copy.deepcopy(model)
    for name, module in expected.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name and not name.endswith("lm_head"):
            module.weight.data = nearest(module.weight.data)
    plain = model(input_ids=IDS).logits
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad(), fp8_linears(model.get_base_model() if is_adapted else model):
        found = model(input_ids=IDS).logits
    linear = nn.functional.linear
    rounded = {id(m.weight) for n, m in expected.named_modules() if n.endswith("_proj") and isinstance(m, nn.Linear)}
    rounded |= {id(m.weight) for n, m in expected.named_modules() if n.endswith("base_layer")}

    def rounding(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return linear(nearest(x) if id(weight) in rounded else x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "linear", rounding)
        patch.setattr("offline_grpo.model.lora_layer.linear", rounding)
        assert torch.allclose(found, expected(input_ids=IDS).logits, atol=2e-3)
    assert (found - plain).abs().max() > 2e-2
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert torch.equal(model(input_ids=IDS).logits, plain)
