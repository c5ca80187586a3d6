"""What processes of a run tell each other; `tests/integration/test_processes.py` starts real ones."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from offline_grpo.placement.ranks import PATIENCE, Ranks


def test_sums_are_made_on_the_group_s_device_and_come_back() -> None:
    """NCCL adds nothing up on CPUs, and batches are there."""
    ranks = Ranks(use_cpu=True)
    sent: list[str] = []

    def reduce(flat: Tensor, reduction: str) -> Tensor:
        sent.append(f"{reduction} on {flat.device.type}")
        return torch.arange(6.0)

    ranks._accelerator = SimpleNamespace(num_processes=2, device=torch.device("meta"), reduce=reduce)  # type: ignore[assignment]
    tensors = [torch.zeros(2, 2), torch.zeros(2)]
    ranks.sum_(tensors)
    assert sent == ["sum on meta"]
    assert torch.equal(tensors[0], torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert torch.equal(tensors[1], torch.tensor([4.0, 5.0]))


def test_processes_are_patient_enough_for_a_server_to_start() -> None:
    ranks = Ranks(use_cpu=True)
    assert ranks._accelerator.init_handler is not None
    assert ranks._accelerator.init_handler.timeout == PATIENCE
