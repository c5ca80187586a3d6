"""AdamW with state in the host's memory, streamed through a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offline_grpo.model.masters import MasterWeights
from offline_grpo.train import offload
from offline_grpo.train.optimizer import AdamW, OffloadedAdamW

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = {"a": (700, 330), "bias": (5,), "b": (4000, 3100), "norm": (129,), "scalar": (), "c": (20, 33, 110)}


@pytest.mark.parametrize("chunk", [1 << 16, 1 << 25], ids=["many_chunks", "one_chunk"])
def test_steps_are_those_of_resident_state_bit_for_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_ELEMENTS", chunk)
    factory = AdamW(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-8, offload=False)
    found = []
    for offloaded in (False, True):
        generator = torch.Generator(CUDA).manual_seed(0)
        model = {
            name: nn.Parameter(torch.randn(s, generator=generator, device=CUDA).bfloat16())
            for name, s in SHAPES.items()
        }
        masters = MasterWeights(model.items(), offload=offloaded)
        optimizer = factory.create(masters.parameters.values())
        if offloaded:
            optimizer = OffloadedAdamW(optimizer, masters)
            assert masters.host is not None
            assert masters.host.flat.is_pinned(), "copies would wait for each other"
        for _ in range(5):
            for parameter in masters.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator, device=CUDA)
            optimizer.step()
            masters.publish()
        state = [value.cpu() for p in masters.parameters.values() for value in optimizer.state[p].values()]
        found.append(
            [*(p.detach().cpu() for p in model.values()), *(value.cpu() for value in masters.values.values()), *state]
        )
        assert masters.differing() == []
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
