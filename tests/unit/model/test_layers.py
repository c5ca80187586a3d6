"""Choosing blocks by index, whatever an architecture calls them."""

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import parse_layer_indices, train_only_blocks

MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=3, n_head=2, n_positions=16)),
    "falcon": lambda: FalconForCausalLM(
        FalconConfig(vocab_size=20, hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
    ),
}


def test_ranges_and_lists():
    assert parse_layer_indices("20-23", 24, key="k") == [20, 21, 22, 23]
    assert parse_layer_indices("0-2, 5,1", 6, key="k") == [0, 1, 2, 5]


@pytest.mark.parametrize("text", ["24", "20-31", "3-1", "a", "1-", "", "-1", "1..3"])
def test_what_is_no_index_of_a_block_is_refused(text):
    with pytest.raises(ConfigError, match=r"train.train_layer_indices="):
        parse_layer_indices(text, 24, key="train.train_layer_indices")


@pytest.mark.parametrize("name", MODELS)
def test_only_the_chosen_blocks_change(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    train_only_blocks(model, [1], 3)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    changed = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert changed
    assert all(".1." in key for key in changed)
    assert {key for key in before if ".1." in key} - changed == set() or name != "qwen2"
