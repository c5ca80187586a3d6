"""The search for the most probable tokens that vLLM's samplers get."""

import importlib
from typing import Any

import pytest
import torch

from offline_grpo.engine.vllm import EXTENSION_FOLDER


@pytest.mark.parametrize(("num_values", "k"), [(5003, 5), (40000, 84), (1000, 84), (70001, 20), (9000, 1), (9000, 0)])
def test_it_finds_what_torch_finds(num_values: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with ties, where most values are minus infinity, and in the rest behind the last whole block."""
    monkeypatch.syspath_prepend(str(EXTENSION_FOLDER))
    ours: Any = importlib.import_module("offline_grpo_topk")
    values = torch.randn(6, num_values, generator=torch.Generator().manual_seed(k))
    values[1] = values[1].bfloat16().float()
    values[2, torch.arange(num_values) % 500 != 7] = -torch.inf
    values[3, -2:] = 9.0
    expected, found = torch.topk(values, k, dim=-1), ours.topk(values, k, dim=-1)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(values.gather(1, found.indices), expected.values)
    assert all(len({*row}) == k for row in found.indices.tolist())
