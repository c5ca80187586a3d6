"""Adapters that would make another model than the one that is trained, and architectures in which not every layer is an
nn.Linear.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ZOO, long_batch
from engines import full_weights
from factories import make_llama, make_policy, make_qwen2, make_scoring
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LagunaConfig, LagunaForCausalLM

from offline_grpo.checkpoint.pretrained import export_model, find_model
from offline_grpo.errors import ConfigError
from offline_grpo.model.adapters import with_lora, with_saved_adapter
from offline_grpo.model.policy import ADAPTER_FILE, Policy, save_adapter
from offline_grpo.model.scoring import BaseScoring
from offline_grpo.settings import LoraConfig


def adapted(model: Any, *targets: str, dropout: float = 0.0, layer_indices: str | None = None) -> Any:
    return with_lora(model, LoraConfig(8, 16, dropout, list(targets) or ["all-linear"], layer_indices), adapter=None)


def num_adapters(model: Any) -> int:
    return sum(".lora_B" in name for name, _ in model.named_parameters())


def test_input_embeddings_that_are_the_output_head_too_are_not_adapted() -> None:
    """The adapter would be on the input alone, and a merged model would have it in the output too."""
    with pytest.raises(ConfigError, match=r"^model.lora.target_modules=\['embed_tokens', 'q_proj'\]: "):
        adapted(make_qwen2(), "embed_tokens", "q_proj")
    model = adapted(make_llama(), "embed_tokens", "q_proj")  # with a head of its own
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(3, 19)[None]
    expected = model(input_ids=ids).logits
    assert torch.allclose(model.merge_and_unload()(input_ids=ids).logits, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2", "phimoe", "llama4"])
def test_switched_off_adapters_leave_the_base_model(name: str) -> None:
    """Experts have one layer of peft's inside another."""
    base = make_scoring(ZOO[name].build()).logprobs(long_batch())
    model = adapted(ZOO[name].build())
    for parameter_name, parameter in model.named_parameters():
        if ".lora_" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    scoring = make_scoring(model)
    expected = scoring.logprobs(long_batch())
    assert not torch.allclose(expected, base, atol=1e-2)
    assert torch.equal(BaseScoring(scoring).logprobs(long_batch()), base)
    assert torch.equal(scoring.logprobs(long_batch()), expected), "and they are back"


def test_a_router_that_returns_more_than_a_product_is_left_out() -> None:
    assert not any("router" in name and "lora" in name for name, _ in adapted(ZOO["phimoe"].build()).named_parameters())
    with pytest.raises(ConfigError, match=r"target_modules=\['q_proj', 'router'\]: router returns more than a product"):
        adapted(ZOO["phimoe"].build(), "q_proj", "router")


@pytest.mark.filterwarnings("error:The following")
def test_experts_of_two_parts_have_twice_the_rank() -> None:
    """vLLM has to have room for it. peft says falsely that they have not."""
    policy = Policy(make_scoring(adapted(ZOO["qwen3_moe"].build())), None)  # type: ignore[arg-type]
    assert policy.lora_rank == 16
    assert (
        max(
            p.shape[0]
            for name, p in policy.model.named_parameters()
            if name.endswith("experts.base_layer.lora_A.default.weight")
        )
        == 4 * 16
    )
    assert Policy(make_scoring(adapted(make_llama())), None).lora_rank == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_chosen_blocks_have_the_adapters_that_all_blocks_have(name: str) -> None:
    whole, second = (
        num_adapters(adapted(ZOO[name].build())),
        num_adapters(adapted(ZOO[name].build(), layer_indices="1")),
    )
    assert 0 < whole == 2 * second


def make_laguna() -> LagunaForCausalLM:
    """Its shared experts have names that peft would rename when it loads an adapter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8, "vocab_size": 97}
    sizes |= {"shared_expert_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LagunaForCausalLM(LagunaConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, **sizes)).eval()


@pytest.mark.parametrize("build", [make_laguna, ZOO["qwen3_moe"].build], ids=["laguna", "experts"])
def test_a_saved_adapter_is_loaded_whole_or_not_at_all(
    build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = build().eval()
    model = adapted(copy.deepcopy(base))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    policy = make_policy(model)
    save_adapter(policy, full_weights(policy), tmp_path)

    def loaded() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return with_saved_adapter(copy.deepcopy(base), str(tmp_path), key="MODEL", is_trainable=False).eval()

    stock = dict(PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).get_base_model().named_parameters())
    own = {name: value for name, value in model.get_base_model().named_parameters() if ".lora_" in name}
    lost = [name.replace(".default", "") for name, value in own.items() if not torch.equal(value, stock[name])]
    assert bool(lost) == (build is make_laguna)

    ids = torch.arange(3, 19)[None]
    assert (model(input_ids=ids).logits - base(input_ids=ids).logits).abs().max() > 0.1
    assert torch.equal(loaded()(input_ids=ids).logits, model(input_ids=ids).logits)

    tensors = load_file(tmp_path / ADAPTER_FILE)
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / ADAPTER_FILE)
    base.save_pretrained(tmp_path / "base")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": f"{tmp_path}/base"}))
    alone: dict[str, Any] = {"merge": False, "dtype": None, "card": ""}
    for use in (loaded, lambda: export_model(find_model(str(tmp_path)), tmp_path / "out", **alone)):
        with pytest.raises(ConfigError, match=rf"^MODEL={tmp_path}: the adapter lacks 1 tensors, {name}; take "):
            use()
    assert not (tmp_path / "out").exists()
    save_file(tensors, tmp_path / ADAPTER_FILE)
    export_model(find_model(str(tmp_path)), tmp_path / "out", **alone)
    lines = [line for line in caplog.messages if "peft's own" in line]
    assert len(lines) == bool(lost)
    assert all(f"leaves out {len(lost)} tensors" in line for line in lines)
    assert all(name.replace(".1.", ".*.") in line for line in lines for name in lost)
    assert (tmp_path / "out" / ADAPTER_FILE).read_bytes() == (tmp_path / ADAPTER_FILE).read_bytes()
    other = name.replace("layers.0.", "layers.9.")
    save_file({**tensors, other: tensors[name].clone()}, tmp_path / ADAPTER_FILE)
    with pytest.raises(ConfigError, match=r"the adapter has, and the model does not, 1 tensors, \S*layers\.9\."):
        loaded()
