"""Which layout a run gets, and where each one runs; tests/gpu compares what they compute, test_prefix_tree.py has the trees."""

import pytest
import torch
from factories import make_qwen2, make_scoring

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Layout
from offline_grpo.model.layouts import LAYOUTS, choose_layout, layout_named
from offline_grpo.model.layouts.padded import Padded
from offline_grpo.model.layouts.varlen import VARLEN, Varlen

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        (CPU, torch.float32, "tree"),
        (CPU, torch.bfloat16, "tree"),
        (CUDA, torch.bfloat16, "varlen"),
        (CUDA, torch.float16, "varlen"),
        (CUDA, torch.float32, "padded"),
        (MPS, torch.bfloat16, "padded"),
    ],
)
def test_auto_is_the_fastest_that_runs_there(device, dtype, name):
    assert layout_named("auto") is None
    assert type(choose_layout(None, device, dtype)) is LAYOUTS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_what_its_name_says(name):
    layout = layout_named(name)
    assert isinstance(layout, Layout)
    assert choose_layout(layout, CUDA, torch.bfloat16) is layout
    assert isinstance(layout.for_memory_plan(), (Padded, Varlen))


@pytest.mark.parametrize(("device", "dtype", "has"), [(CPU, torch.bfloat16, "cpu and bfloat16"), (CUDA, torch.float32, "cuda and float32")])
def test_varlen_is_refused_where_its_kernel_does_not_run(device, dtype, has):
    message = f"^model.layout=varlen: needs a CUDA device and .* this run has {has}; use model.layout=auto$"
    with pytest.raises(ConfigError, match=message):
        choose_layout(Varlen(), device, dtype)


def test_attention_is_the_layouts_inside_and_the_models_own_afterwards():
    decoder = make_qwen2().get_decoder()
    before = decoder.config._attn_implementation
    with pytest.raises(ZeroDivisionError), Varlen().attention(decoder):
        assert decoder.config._attn_implementation == VARLEN
        _ = 1 / 0
    assert decoder.config._attn_implementation == before


def test_a_layout_answers_for_each_token_whatever_the_order(token_batch):
    scoring = make_scoring(make_qwen2())
    whole = scoring.logprobs(token_batch)
    starts = [0, *torch.tensor(token_batch.sequence_lengths).cumsum(0).tolist()]
    for sequence in (3, 0, 7):
        alone = scoring.logprobs(token_batch.select([sequence]))
        assert torch.allclose(whole[starts[sequence] : starts[sequence + 1]], alone, atol=2e-5)
