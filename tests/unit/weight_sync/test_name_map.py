"""Which rows of vLLM's fused tensors are which parameter of the checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import (
    SHAPES,
    FusedModel,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    Weighted,
    make_worker,
)
from torch import nn

from offline_grpo.engine.inside_vllm.offline_grpo_weights import layout as spread_layout
from offline_grpo.engine.vllm import of_wholes


def layout(model: nn.Module) -> list[dict[str, Any]]:
    return list(spread_layout(model))


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


def test_the_last_of_four_workers() -> None:
    """By hand: 4 query heads of 2 rows, each worker has one; 2 of keys, each for two workers; a vocabulary of 10 and 6
    rows of padding, of which it has 4. What only a loader of its own knows is left out.
    """
    qkv, own = QKVParallelLinear(8, 2, heads=1, kv_heads=1, tp_size=4, num_kv_head_replicas=2), Weighted(3, 8)
    own.weight.weight_loader = print  # type: ignore[attr-defined]
    expected = {
        "q.weight": (0, 2, 0, 6, 8),
        "k.weight": (2, 2, 0, 2, 4),
        "v.weight": (4, 2, 0, 2, 4),
        "up.weight": (0, 3, 0, 9, 12),
        "gate.weight": (3, 5, 0, 15, 20),
        "out.weight": (0, 8, 1, 6, 8),
        "out.bias": (0, 8, 0, 0, 8),
        "words.weight": (0, 0, 0, 10, 10),
        "norm.weight": (0, 8, 0, 0, 8),
    }
    model = nn.ModuleDict(
        {
            "qkv": qkv,
            "up_gate": MergedColumnParallelLinear(8, [12, 20], tp_size=4),
            "out": RowParallelLinear(8, 2, bias=True, tp_size=4),
            "words": VocabParallelEmbedding(10, 16, 8, tp_size=4),
            "norm": Weighted(8),
            "own": own,
        }
    )
    model.packed_modules_mapping = {"qkv": ["q", "k", "v"], "up_gate": ["up", "gate"]}
    entries = spread_layout(model, is_spread=True)
    keys = ("row", "rows", "dim", "start", "whole")
    assert {entry["name"]: tuple(entry[key] for key in keys) for entry in entries} == expected


def test_parts_of_workers_add_up() -> None:
    found = [{"a": (0, "f" * 16), "b": (0, "5")}, {"a": (8, f"{3:016x}"), "b": (0, "5")}]
    assert of_wholes(found) == {"a": f"{2:016x}", "b": f"{5:016x}"}
    assert of_wholes([*found, {"b": (0, "0")}])["b"] == "different in different workers"


def test_only_what_is_in_the_models_dtype_has_a_fingerprint() -> None:
    """vLLM keeps some small tensors in fp32 beside a model in bf16."""
    model = FusedModel(dtype=torch.bfloat16)
    model.model.layers[0].norm = Weighted(8)
    worker = make_worker(model, model_config__dtype=torch.bfloat16)
    assert SHAPES.keys() - worker.grpo_state()["fingerprints"].keys() == {"model.layers.0.norm.weight"}
    name, queries = "model.layers.0.self_attn.q_proj.weight", model.model.layers[0].self_attn.qkv_proj.weight[:16]
    assert worker.grpo_sums([name]) == {name: (0, f"{int(queries.view(torch.int16).sum()) % 2**64:016x}")}


def test_a_composite_has_the_names_of_transformers_and_not_those_of_older_checkpoints() -> None:
    """vLLM's map is from both; the head is a module of its own."""

    class Composite(nn.Module):
        hf_to_vllm_mapper = SimpleNamespace(
            orig_to_new_prefix={
                "model.": "language_model.model.",
                "model.language_model.": "language_model.model.",
                "lm_head.": "language_model.lm_head.",
                "mtp.": None,
            }
        )

        def __init__(self) -> None:
            super().__init__()
            self.language_model = FusedModel()
            self.packed_modules_mapping = self.language_model.packed_modules_mapping

        def get_language_model(self) -> nn.Module:
            return self.language_model

    expected = {name.replace("model.", "model.language_model.", 1): shape for name, shape in SHAPES.items()}
    assert {entry["name"]: tuple(entry["shape"]) for entry in layout(Composite())} == expected
