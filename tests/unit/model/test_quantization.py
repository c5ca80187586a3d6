"""Weights in fewer bits: NF4 against the paper's levels, FP8 against a table of all numbers of e4m3, what a model
computes with them, their size, and what a server that holds them says of them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from bitsandbytes.nn.modules import Linear4bit
from factories import make_llama
from fake_vllm import FusedModel, make_worker
from torch import nn
from transformers import LlamaConfig as Llama
from transformers import LlamaForCausalLM

from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints
from offline_grpo.model import quantization
from offline_grpo.model.adapters import with_lora
from offline_grpo.model.load import load_causal_lm
from offline_grpo.model.quantization import fp8_linears
from offline_grpo.settings import LoraConfig

CPU = torch.device("cpu")
# Dettmers et al., arXiv 2305.14314, appendix E
LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a Llama in bf16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(Llama(vocab_size=100, **sizes)).to(torch.bfloat16)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return str(path)


def loaded(folder: str, quantization: str | None, dtype: torch.dtype = torch.float32):
    return load_causal_lm(folder, "auto", CPU, dtype, quantization=quantization)


def numbers(module: Linear4bit) -> torch.Tensor:
    return quantization.dequantized(module.weight.data, module.weight)


def test_a_weight_is_the_nearest_of_the_papers_levels(folder):
    plain, packed = loaded(folder, None), loaded(folder, "nf4")
    layers = {name: module for name, module in packed.named_modules() if isinstance(module, Linear4bit)}
    assert len(layers) == 14  # all but the head
    for name, layer in layers.items():
        blocks = plain.get_submodule(name).weight.view(-1, 64)  # [blocks, 64]
        scale = blocks.abs().amax(1, keepdim=True)
        nearest = LEVELS[(blocks.unsqueeze(-1) / scale.unsqueeze(-1) - LEVELS).abs().argmin(-1)] * scale
        assert (numbers(layer).view_as(blocks).float() - nearest).abs().max() < 0.01 * scale.max()  # 8 bits of scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_of_the_dequantised_weights(folder, dtype):
    """After a pass as it is made to sample, in which bitsandbytes may pack the weights anew on some CPUs."""
    packed, plain = loaded(folder, "nf4", dtype), loaded(folder, None, dtype)
    for name, module in packed.named_modules():
        if isinstance(module, Linear4bit):
            plain.get_submodule(name).weight.data = numbers(module).to(dtype)
    ids, found = torch.arange(3, 35).view(2, 16), []
    for model in (packed, plain):
        torch.manual_seed(0)
        adapted = with_lora(model, LoraConfig(8, 16, 0.0, ["all-linear"], None), adapter=None)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape).mul(0.05).to(dtype)
        with torch.no_grad():
            adapted(input_ids=ids)
        logits = adapted(input_ids=ids).logits
        logits.float().log_softmax(-1).square().mean().backward()
        found.append((logits, {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}))
    (logits, gradients), (expected, expected_gradients) = found
    assert torch.equal(logits, expected)
    assert gradients.keys() == expected_gradients.keys()
    assert len(gradients) == 28
    assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients.items())


def test_the_formula_of_memory_counts_the_bytes(folder):
    layers = [module for module in loaded(folder, "nf4").modules() if isinstance(module, Linear4bit)]
    states = [layer.weight.quant_state for layer in layers]
    num_bytes = sum(
        layer.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
        for layer, state in zip(layers, states, strict=True)
    )
    sizes = quantization.quantized_sizes(loaded(folder, None))
    assert sizes == [quantization.num_weights(layer.weight) for layer in layers]
    assert sum(sizes) * quantization.TRAINER_BYTES == num_bytes


def test_a_servers_fingerprints_are_those_of_the_same_numbers():
    """vLLM's fused layers hold the packed rows of several parameters, each with a state of its own."""
    served = FusedModel(wrapped=True)
    expected = {}
    for path, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up")), ("mlp.down_proj", None)):
        layer = served.model.layers[0].get_submodule(path).base_layer
        sizes = {"self_attn.qkv_proj": [16, 8, 8], "mlp.gate_up_proj": [12, 12]}.get(path, [8])
        parts = [quantize_4bit(part.clone(), quant_type="nf4") for part in layer.weight.data.split(sizes)]
        for name, (packed, state) in zip(names or ["down"], parts, strict=True):
            weight = nn.Parameter(packed, requires_grad=False)
            weight.quant_state = state
            key = f"model.layers.0.{path.partition('.')[0]}.{name}_proj.weight"
            expected[key] = (0, *fingerprints([quantization.dequantized(packed, weight)]))  # from its first row on
        layer.weight = nn.Parameter(torch.cat([packed for packed, _ in parts]), requires_grad=False)
        ends = torch.tensor([0, *(len(packed) for packed, _ in parts)]).cumsum(0)
        layer.weight.bnb_shard_offsets, layer.weight.bnb_quant_state = ends, dict(enumerate(s for _, s in parts))
    worker = make_worker(served, model_config__quantization="bitsandbytes")
    found = worker.grpo_state()["fingerprints"]
    assert expected.items() <= found.items()
    assert "model.layers.0.self_attn.o_proj.weight" in found  # which is not quantised here
    assert worker.grpo_sums(["model.layers.0.mlp.up_proj.weight"])


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
