"""Small real models and batches that many tests share."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.types import Completion, FinishReason, Rollout, Score, TokenBatch

VOCAB = 40


def make_qwen2(**settings) -> PreTrainedModel:
    """A random Qwen2 with grouped-query attention and tied embeddings."""
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        **settings,
    }
    return Qwen2ForCausalLM(Qwen2Config(**config)).eval()


def make_llama() -> PreTrainedModel:
    """A random Llama with an output head of its own."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def qwen2() -> PreTrainedModel:
    return make_qwen2()


@pytest.fixture
def token_batch() -> TokenBatch:
    """Twelve sequences of skewed length with random tokens, logprobs and advantages."""
    generator = torch.Generator().manual_seed(7)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCAB, (n,), generator=generator).tolist())

    rollouts = []
    for i in range(12):
        completion = ids(1 + (i * i) % 17)
        logprobs = tuple((-torch.rand(len(completion), generator=generator)).tolist())
        rollouts.append(Rollout(ids(2 + i % 5), Completion(completion, logprobs, FinishReason.STOP, 0), "", Score(0.0, False, {})))
    batch = build_batch(rollouts, temperature=1.3, mask_truncated=False)
    return with_advantages(batch, torch.randn(12, generator=generator).tolist())
