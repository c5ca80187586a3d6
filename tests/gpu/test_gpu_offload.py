"""Inputs of blocks that wait in the host's memory, copied beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from factories import make_qwen2, make_rollout, make_scoring

from offline_grpo.model.device import be_deterministic
from offline_grpo.model.offload import offload_inputs
from offline_grpo.model.scoring import prepare_for_gradients
from offline_grpo.train.batch import build_batch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BLOCKS, HIDDEN = 12, 512
LENGTHS = (9000, 30000, 9000, 20000)
"""Tokens of each microbatch: smaller ones use the memory of larger ones, which are not waited for."""


def passes(*, offloaded: bool) -> tuple[list[torch.Tensor], int]:
    """The gradients of some microbatches, and the most bytes on the GPU beside weights and gradients."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": BLOCKS, "num_attention_heads": 8}
    model: Any = make_qwen2(**sizes, max_position_embeddings=max(LENGTHS) + 8, initializer_range=0.02)
    model.to(CUDA, torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if offloaded:
        offload_inputs(model)
    prepare_for_gradients(model)
    scoring = make_scoring(model)
    before, peak = torch.cuda.memory_allocated(), 0
    for number, length in enumerate(LENGTHS):
        torch.manual_seed(number)
        ids = torch.randint(5, 40, (length,)).tolist()
        batch = build_batch([make_rollout(ids[: length // 2], ids[length // 2 :])]).to(CUDA)
        torch.cuda.reset_peak_memory_stats()
        stats = scoring(batch)
        with scoring.attention(batch):
            stats.logprobs.sum().backward()
        peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return [p.grad for p in model.parameters()], peak


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The attention's backward pass, too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    be_deterministic()
    yield
    torch.use_deterministic_algorithms(False)


def test_gradients_are_the_same_bit_for_bit_with_less_memory(deterministic: None) -> None:
    (expected, most), (again, _), (found, less) = (passes(offloaded=each) for each in (False, False, True))
    assert all(map(torch.equal, again, expected)), "else there is nothing to compare"
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    saved = (BLOCKS - 3) * max(LENGTHS) * HIDDEN * 2
    print(f"{most / 2**20:.0f} MiB, {less / 2**20:.0f} with inputs in the host's memory, {saved / 2**20:.0f} of them")
    assert less <= most - 0.9 * saved
