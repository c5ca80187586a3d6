"""Trees of shared prefixes: the layout by hand, and the same scores and gradients as one sequence at a time."""

from dataclasses import replace

import pytest
import torch
from factories import make_llama, make_qwen2, make_rollout, make_scoring

from offline_grpo.model.layouts.rows import Padded, Tree, prefix_trees
from offline_grpo.train.batch import build_batch, with_advantages


def batch_of(*pairs):
    rollouts = [make_rollout(p, c) for p, c in pairs]
    return with_advantages(build_batch(rollouts, mask_truncated=False), [1.0] * len(rollouts))


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


@pytest.mark.parametrize("make", [make_qwen2, make_llama])
def test_scores_and_gradients_equal_rows_of_whole_sequences(make):
    generator = torch.Generator().manual_seed(3)

    def ids(n):
        return torch.randint(1, 12, (n,), generator=generator).tolist()

    pairs = [(prompt, ids(1 + k % 4)) for prompt in (ids(9), ids(14), ids(6)) for k in range(8)]
    batch = batch_of(*pairs)
    assert prefix_trees(batch) is not None
    results = []
    for layout in (Tree(), Padded()):
        model = make()
        stats = make_scoring(model, layout)(batch, entropy_requires_grad=True)
        (stats.logprobs * torch.arange(len(batch.token_ids))).sum().backward()
        results.append((stats, {name: p.grad for name, p in model.named_parameters()}))
    (tree, tree_gradients), (rows, row_gradients) = results
    assert torch.allclose(tree.logprobs, rows.logprobs, atol=2e-5)
    assert torch.allclose(tree.entropy, rows.entropy, atol=2e-5)
    for name, gradient in row_gradients.items():
        assert torch.allclose(tree_gradients[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max())), name


def test_masked_completions_do_not_disturb_the_others():
    batch = batch_of(*GROUP, *GROUP)
    masked = replace(batch, completion_mask=batch.completion_mask & (batch.sequence_ids > 1))
    scores = [make_scoring(make_qwen2(), layout).logprobs(masked) for layout in (Tree(), Padded())]
    assert torch.allclose(*scores, atol=2e-5)
