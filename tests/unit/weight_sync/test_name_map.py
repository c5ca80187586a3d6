"""Which rows of vLLM's fused tensors are which parameter of the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside_vllm import (
    SHAPES,
    FusedModel,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    Weighted,
    make_worker,
)
from torch import nn


def layout(model: nn.Module) -> list[dict[str, Any]]:
    return make_worker(model).grpo_layout()


def places(model: nn.Module) -> dict[str, tuple[str, int, int]]:
    """Checkpoint name -> (tensor, first row, rows)."""
    entries = layout(model)
    found = {entry["name"]: (entry["tensor"], entry["row"], entry["rows"]) for entry in entries}
    assert len(found) == len(entries), "a name is there twice"
    return found


class Model(nn.Module):
    """A model of one layer, called `fused`."""

    def __init__(self, layer: nn.Module, *names: str) -> None:
        super().__init__()
        self.fused = layer
        self.packed_modules_mapping = {"fused": list(names)}


def test_queries_keys_and_values_of_grouped_attention() -> None:
    """7 query heads and one of keys and values, as in Qwen2.5 0.5B: 14 : 2, and biases."""
    qkv = Model(QKVParallelLinear(3, 2, heads=7, kv_heads=1, bias=True), "q", "k", "v")
    assert places(qkv) == {
        "q.weight": ("fused.weight", 0, 14),
        "k.weight": ("fused.weight", 14, 2),
        "v.weight": ("fused.weight", 16, 2),
        "q.bias": ("fused.bias", 0, 14),
        "k.bias": ("fused.bias", 14, 2),
        "v.bias": ("fused.bias", 16, 2),
    }
    assert {entry["name"]: entry["shape"] for entry in layout(qkv)}["k.weight"] == [2, 3]
    assert {entry["name"]: entry["shape"] for entry in layout(qkv)}["k.bias"] == [2]


@pytest.mark.parametrize("layer", [QKVParallelLinear(4, 2, heads=2, kv_heads=1), MergedColumnParallelLinear(4, [4, 4])])
@pytest.mark.parametrize("names", [(), ("fused",)])
def test_a_layer_that_is_fused_in_the_checkpoint_too_stays_whole(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Phi-3 has one qkv_proj in its files, and GPT-NeoX one query_key_value that vLLM has no mapping for."""
    assert places(Model(layer, *names)) == {"fused.weight": ("fused.weight", 0, 8)}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_whole_model(wrapped: bool) -> None:
    """The levels that LoRA wrappers add are in no name."""
    model = FusedModel(wrapped=wrapped)
    assert {entry["name"]: tuple(entry["shape"]) for entry in layout(model)} == SHAPES
    plain = {
        name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    covered = dict.fromkeys(plain, 0)
    for tensor, row, rows in places(model).values():
        assert 0 <= row <= row + rows <= len(plain[tensor])
        covered[tensor] += rows
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    assert covered == {name: 10 if name in vocabulary else len(parameter) for name, parameter in plain.items()}


def test_the_state_has_every_parameter_apart() -> None:
    """A change of one row of a fused tensor is a change of one parameter."""
    model = FusedModel(tied=False, wrapped=True)
    worker = make_worker(model)
    before = worker.grpo_state()
    assert before["fingerprints"].keys() == SHAPES.keys()
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.base_layer.weight[20, 3] += 1
        model.model.embed_tokens.weight[12] += 1  # padding
    after = worker.grpo_state()
    changed = {name for name in SHAPES if before["fingerprints"][name] != after["fingerprints"][name]}
    assert changed == {"model.layers.0.self_attn.k_proj.weight"}
    assert worker.grpo_tag() is None


def test_the_tag_is_forgotten_when_anybody_loads_weights() -> None:
    """By either way that vLLM has: from a folder, and tensor by tensor from another process."""

    class Runner:
        def reload_weights(self, path: str) -> str:
            return f"loaded {path}"

    class Loadable(FusedModel):
        def load_weights(self, weights: list[str]) -> int:
            return len(weights)

    model = Loadable()
    worker = make_worker(model)
    worker.model_runner = Runner()
    worker.model_runner.get_model = lambda: model
    for _ in range(2):
        worker.grpo_set_tag("3 of run r")
        assert worker.grpo_tag() == "3 of run r"
        assert worker.model_runner.reload_weights(path="m") == "loaded m"
        assert worker.grpo_tag() == ""
        worker.grpo_set_tag("3 of run r")
        assert model.load_weights(["a", "b"]) == 2
        assert worker.grpo_tag() == ""
    worker.grpo_set_tag("7 of run 8")
    assert worker.grpo_tag() == "7 of run 8"


def test_only_what_is_in_the_models_dtype_has_a_fingerprint() -> None:
    """vLLM keeps some small tensors in fp32 beside a model in bf16."""
    model = FusedModel(dtype=torch.bfloat16)
    model.model.layers[0].norm = Weighted(8)
    worker = make_worker(model, model_config__dtype=torch.bfloat16)
    assert SHAPES.keys() - worker.grpo_state()["fingerprints"].keys() == {"model.layers.0.norm.weight"}
    name, queries = "model.layers.0.self_attn.q_proj.weight", model.model.layers[0].self_attn.qkv_proj.weight[:16]
    assert worker.grpo_sums([name]) == {name: f"{int(queries.view(torch.int16).sum()) % 2**64:016x}"}
