"""LoRA layers whose scale is folded into B, and that share the product with their input, against peft's own."""

from __future__ import annotations

import pytest
import torch
from factories import make_llama
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, inject_adapter_in_model
from torch import nn

from offline_grpo.model.adapters import with_lora
from offline_grpo.model.layouts import Padded
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.lora_layer import FoldedLinear, fold_scales, share_inputs
from offline_grpo.model.proof import settle_layout
from offline_grpo.model.scoring import Scoring
from offline_grpo.settings import LoraConfig

IDS = torch.arange(3, 19).view(2, 8)
ALPHA, RANK = 12, 8  # a scale of 1.5


def peft_model(**settings):
    config = PeftLoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    model = get_peft_model(make_llama(), config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def logits_and_gradients(model):
    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    logits = model(input_ids=IDS).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("dropout", "use_rslora", "shares"), [(0.0, False, False), (0.3, True, False), (0.0, False, True)]
)
def test_logits_and_gradients_are_those_of_peft(dropout, use_rslora, shares):
    theirs, ours = (peft_model(lora_dropout=dropout, use_rslora=use_rslora).train() for _ in range(2))
    assert fold_scales(ours, "default") == 14  # seven layers in two blocks
    if shares:  # in each of two blocks q, k and v, and gate and up
        assert share_inputs(ours, lambda: ours(input_ids=IDS)) == 4
    (expected, expected_gradients), (found, gradients) = logits_and_gradients(theirs), logits_and_gradients(ours)
    assert torch.allclose(found, expected, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    assert len(gradients) == 28
    for name, gradient in expected_gradients.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name


def test_a_layer_in_another_format_is_left_alone():
    """As routers are that stay in fp32; peft converts what such a layer reads and writes."""
    bare = make_llama().to(torch.bfloat16)
    bare.model.layers[1].mlp.down_proj.float()
    bare.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    bare.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out.to(torch.bfloat16))
    model = with_lora(bare, LoraConfig(RANK, ALPHA, 0.0, ["all-linear"], None), adapter=None)
    assert sum(isinstance(module, FoldedLinear) for module in model.modules()) == 13
    assert model(input_ids=IDS).logits.isfinite().all()


class Odd(nn.Module):
    """Layers of names that elsewhere share their input."""

    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            self.add_module(name, nn.Linear(8, 8, bias=False))
        self.others_differ = False

    def forward(self, x):
        y = x + 1
        q, k, v = self.q_proj(x), self.k_proj(y if self.others_differ else x), self.v_proj(y)
        return q + k + v + self.gate_proj(x) + self.gate_proj(y) + self.up_proj(y)


def odd_model():
    torch.manual_seed(0)
    config = PeftLoraConfig(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    return inject_adapter_in_model(config, Odd())


def test_only_layers_that_always_read_the_same_input_share_it():
    theirs, ours = odd_model(), odd_model()
    fold_scales(ours, "default")
    x = torch.randn(3, 8)
    assert share_inputs(ours, lambda: ours(x)) == 1
    assert [name for name, module in ours.named_modules() if isinstance(module, FoldedLinear) and module.shared] == [
        "q_proj",
        "k_proj",
    ]
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    theirs.others_differ = ours.others_differ = True  # not as they were when it was looked up
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_a_run_s_layers_share_their_inputs():
    model = with_lora(make_llama(), LoraConfig(RANK, ALPHA, 0.0, ["all-linear"], None), adapter=None)
    settle_layout(Scoring(model, Padded(), TiledHead(tile_width=None)), None, torch.device("cpu"))
    assert sum(isinstance(module, FoldedLinear) and module.shared is not None for module in model.modules()) == 10
