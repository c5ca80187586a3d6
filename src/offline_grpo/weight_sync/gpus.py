"""Which physical GPU something is on."""

from __future__ import annotations

import torch


def gpu_uuid(device: torch.device) -> str | None:
    """The physical GPU behind a device, None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
