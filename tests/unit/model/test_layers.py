"""Choosing blocks by index, whatever an architecture calls them."""

import pytest
import torch
from architectures import ZOO

from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import parse_layer_indices, train_only_blocks


def test_ranges_and_lists():
    assert parse_layer_indices("20-23", 24, key="k") == [20, 21, 22, 23]
    assert parse_layer_indices("0-2, 5,1", 6, key="k") == [0, 1, 2, 5]


@pytest.mark.parametrize("text", ["24", "20-31", "3-1", "a", ""])
def test_what_is_no_index_of_a_block_is_refused(text):
    with pytest.raises(ConfigError, match=r"train.train_layer_indices="):
        parse_layer_indices(text, 24, key="train.train_layer_indices")


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "falcon"])
def test_only_the_chosen_blocks_change(name):
    torch.manual_seed(0)
    model = ZOO[name].build()
    train_only_blocks(model, [1], 2)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    changed = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert changed
    assert all(".1." in key for key in changed)
    assert {key for key in before if ".1." in key} - changed == set() or name != "qwen2"
