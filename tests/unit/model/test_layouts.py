"""Which layout a run gets, where each one runs, and trees of shared prefixes: by hand, and against one sequence at a
time.
"""

from dataclasses import replace

import pytest
import torch
from architectures import ZOO
from factories import make_qwen2, make_rollout, make_scoring

from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import decoder_of
from offline_grpo.model.layouts import (
    LAYOUTS,
    VARLEN,
    Padded,
    Tree,
    Varlen,
    layout_named,
    layouts_for,
    prefix_trees,
)
from offline_grpo.train.batch import build_batch, with_advantages

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
    batch = build_batch(rollouts)
    model = ZOO["gpt_neo"].build(window_size=window)
    shapes = []
    decoder_of(model).register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    found = make_scoring(model, Tree()).logprobs(batch)
    assert shapes[0][0] == rows
    assert torch.allclose(found, make_scoring(model, Padded()).logprobs(batch), atol=2e-5)


def batch_of(*pairs):
    rollouts = [make_rollout(p, c) for p, c in pairs]
    return with_advantages(build_batch(rollouts), [1.0] * len(rollouts))


GROUP = [([2, 9, 3, 8], [5]), ([2, 9, 3, 8], [6]), ([2, 9, 3, 8], [5, 6]), ([2, 9, 3, 8], [5])]


def test_layout_is_the_documented_example():
    trees = prefix_trees(batch_of(*GROUP))
    assert trees.token_ids.tolist() == [[2, 9, 3, 8, 5, 6, 6]]
    assert trees.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    assert trees.columns.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4]
    seen = (trees.attention_mask(torch.float32)[0, 0] == 0).tolist()
    assert [node for node in range(7) if seen[5][node]] == [0, 1, 2, 3, 5]
    assert [node for node in range(7) if seen[6][node]] == [0, 1, 2, 3, 4, 6]


def test_prompts_that_only_begin_alike_stay_apart():
    trees = prefix_trees(batch_of(*GROUP, *[([2, 9], c) for c in ([3], [3, 8], [3, 8])]))
    assert trees.token_ids.shape[0] == 2


def test_little_in_common_is_no_case_for_trees():
    assert prefix_trees(batch_of(([1, 2], [3, 4, 5]), ([2, 3], [4, 5]))) is None
    assert prefix_trees(batch_of(*[([1] * 300, [k] * 60) for k in range(5)])) is None  # a row of 600 nodes


def test_masked_completions_do_not_disturb_the_others():
    batch = batch_of(*GROUP, *GROUP)
    masked = replace(batch, completion_mask=batch.completion_mask & (batch.sequence_ids > 1))
    scores = [make_scoring(make_qwen2(), layout).logprobs(masked) for layout in (Tree(), Padded())]
    assert torch.allclose(*scores, atol=2e-5)
