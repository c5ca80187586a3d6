"""`train.gradient_checkpointing=auto`: how many blocks are recomputed in the backward pass, so that the memory plan
fits.
"""

from __future__ import annotations

from dataclasses import replace

from offline_grpo.placement.device_plan import ACTIVATIONS, DevicePlan
from offline_grpo.placement.memory_plan import MemoryRequest, predict

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the blocks. Recomputing all of them costs about a third of the time of an update."""
MARGIN = 0.1
"""Of the activations: by how much the prediction of what is predicted worst may be too small."""


def choose_share(request: MemoryRequest) -> tuple[float, list[DevicePlan]]:
    """The smallest of `SHARES` whose prediction fits, and that prediction; all blocks, where none does."""
    share, devices = SHARES[-1], []
    for share in SHARES:
        devices = predict(replace(request, recompute=share))
        if all(map(_fits, devices)):
            break
    return share, devices


def in_words(share: float) -> str:
    """Which blocks are recomputed."""
    return {0.0: "no block", 1.0: "every block"}.get(share, f"{share:.0%} of the blocks")


def _fits(device: DevicePlan) -> bool:
    activations = sum(part.num_bytes for part in device.trainer if part.name == ACTIVATIONS)
    return device.needed_bytes + MARGIN * activations <= device.total_bytes
