"""Sampler and trainer agree: before the first update the ratio of their probabilities is 1, at any temperature."""

import pytest
from factories import generate, make_rollout, make_updater

from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.types import SamplingParams, TokenBatch


class NoText:
    eos_token_id = 3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_ratio_to_the_sampler_is_one_before_the_first_update(tmp_path, temperature):
    updater = make_updater(tmp_path, updates_per_iteration=2)
    client = TransformersClient(updater.passes.policy.model, NoText(), batch_size=16)
    prompts = [[5, 6, 7], [8, 9], [4, 5, 6, 7, 8, 9]]
    groups = generate(client, prompts, SamplingParams(12, temperature=temperature), group_size=8, seeds=[1, 100, 200])

    def batch_of(scored_at: float) -> TokenBatch:
        pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
        return build_batch([make_rollout(*pair, temperature=scored_at) for pair in pairs])

    batch = with_advantages(batch_of(temperature), [1.0, -1.0] * 12)
    scored = updater.passes.score(batch)
    ratio = (scored.old_logprobs - scored.rollout_logprobs).exp()[batch.completion_mask]
    assert len(ratio) > 50
    assert ratio.tolist() == pytest.approx([1.0] * len(ratio), abs=1e-4)
    assert updater.run(scored, iteration=0)["alignment/diff_abs_mean"] < 1e-5
    wrong = updater.passes.score(batch_of(1.6))
    assert (wrong.old_logprobs - scored.rollout_logprobs).abs().max() > 0.1  # the temperature matters
