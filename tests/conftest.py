"""Fixtures that many tests share; the models behind them are made in factories.py."""

from __future__ import annotations

import pytest
import torch
from factories import VOCAB, make_completion, make_qwen2, make_rollout
from transformers import PreTrainedModel

from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.types import TokenBatch


def pytest_configure(config: pytest.Config) -> None:
    """With xdist, files are handed out in their order; by number of tests, the long ones of few tests would come last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


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
        rollouts.append(make_rollout(ids(2 + i % 5), make_completion(completion, logprobs), temperature=1.3))
    batch = build_batch(rollouts, mask_truncated=False)
    return with_advantages(batch, torch.randn(12, generator=generator).tolist())
