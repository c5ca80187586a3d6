"""Inputs of blocks in the host's memory, against the same passes without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ZOO
from factories import make_scoring
from group_work import batch_of

from offline_grpo.model import offload
from offline_grpo.model.offload import offload_inputs
from offline_grpo.model.scoring import prepare_for_gradients


def gradients(name: str, *, offloaded: bool, shares: tuple[bool, ...] = (True, True)) -> dict[str, torch.Tensor]:
    """Of two backward passes, of which the second has shorter sequences."""
    model: Any = ZOO[name].build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if offloaded:
        offload_inputs(model)
    for block, is_recomputed in zip(model.get_decoder().layers, shares, strict=True):
        block.gradient_checkpointing = is_recomputed
    scoring = make_scoring(model)
    prepare_for_gradients(model)
    for sequences in ([1, 5, 3], [0, 4]):
        scoring(batch_of(1).select(sequences)).logprobs.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("shares", [(True, True), (False, True)])
def test_gradients_are_the_same_bit_for_bit(name: str, shares: tuple[bool, ...], monkeypatch: Any) -> None:
    made = []
    original = offload.host_memory
    monkeypatch.setattr(offload, "host_memory", lambda *args: made.append(args[0]) or original(*args))
    expected, found = (gradients(name, offloaded=each, shares=shares) for each in (False, True))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(made) == sum(shares), "the second pass is in the memory of the first"


def test_an_input_leaves_its_device_and_its_memory_is_used_again() -> None:
    waiting = offload.WaitingInputs()
    first, second = torch.randn(2, 3, 4, requires_grad=True), torch.randn(1, 3, 4, requires_grad=True)
    weight = torch.ones((), requires_grad=True)
    out = waiting.checkpoint(lambda x: (x * weight).sin(), first, use_reentrant=False)
    expected = first.detach().clone()
    first.data.zero_()  # what comes back was copied before
    out.sum().backward()
    assert first.grad is not None
    torch.testing.assert_close(first.grad, expected.cos())
    [room] = waiting._free
    waiting.checkpoint(lambda x: (x * weight).sin(), second, use_reentrant=False).sum().backward()
    assert [each is room for each in waiting._free] == [True]
