"""Which layout a run gets, and where each one runs; tests/gpu compares what they compute, test_prefix_tree.py has the
trees.
"""

import math

import pytest
import torch
from architectures import ZOO
from factories import make_qwen2, make_rollout, make_scoring

from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import decoder_of
from offline_grpo.model.layouts import LAYOUTS, layout_named, layouts_for
from offline_grpo.model.layouts.rows import Padded, Tree, attention_window
from offline_grpo.model.layouts.varlen import VARLEN, Varlen
from offline_grpo.train.batch import build_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        (CPU, torch.float32, "tree"),
        (CUDA, torch.bfloat16, "varlen"),
        (CUDA, torch.float32, "padded"),
    ],
)
def test_auto_is_the_fastest_that_runs_there(device, dtype, name):
    assert layout_named("auto") is None
    assert type(layouts_for(None, device, dtype)[0]) is LAYOUTS[name]


def test_varlen_is_refused_where_its_kernel_does_not_run():
    for device, dtype in ((CPU, torch.bfloat16), (CUDA, torch.float32)):
        with pytest.raises(ConfigError, match=r"^model.layout=varlen: .*use model.layout=auto$"):
            layouts_for(Varlen(), device, dtype)


def test_attention_is_the_layouts_inside_and_the_models_own_afterwards(token_batch):
    decoder = make_qwen2().get_decoder()
    before = decoder.config._attn_implementation
    with pytest.raises(ZeroDivisionError), Varlen().attention(decoder, token_batch):
        assert decoder.config._attn_implementation == VARLEN
        _ = 1 / 0
    assert decoder.config._attn_implementation == before


def test_sequences_longer_than_a_chunk_get_padded_rows(token_batch):
    """Variable-length attention knows windows, and not Llama 4's chunks."""
    longest = max(token_batch.sequence_lengths)
    for chunk, attention in ((longest, VARLEN), (longest - 1, "sdpa")):
        model = ZOO["llama4"].build(attention_chunk_size=chunk)
        decoder = decoder_of(model)
        with Varlen().attention(decoder, token_batch):
            assert decoder.config._attn_implementation == attention
    found = make_scoring(model, Varlen()).logprobs(token_batch)
    assert torch.equal(found, make_scoring(model, Padded()).logprobs(token_batch))


@pytest.mark.parametrize(("window", "rows"), [(60, 2), (10, 12)])
def test_trees_wider_than_a_window_become_padded_rows(window, rows):
    """GPT-Neo's local attention counts columns, not positions."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 9, 7, 8, 9, 10, 11, 12]]
    rollouts = [make_rollout(prompt, [20 + i, 3, 4 + i]) for prompt in prompts for i in range(6)]
    batch = build_batch(rollouts, mask_truncated=False)
    model = ZOO["gpt_neo"].build(window_size=window)
    shapes = []
    decoder_of(model).register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    found = make_scoring(model, Tree()).logprobs(batch)
    assert shapes[0][0] == rows
    assert torch.allclose(found, make_scoring(model, Padded()).logprobs(batch), atol=2e-5)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mistral_window", {"sliding_window": 6}, 6),
        ("qwen2", {"max_window_layers": 2}, math.inf),  # a number of layers
        ("llama4", {"attention_chunk_size": 17}, 17),
    ],
)
def test_the_window_of_a_model_is_found(name, changes, expected):
    assert attention_window(decoder_of(ZOO[name].build(**changes))) == expected
