"""Parameters that are spread over processes: DTensors. Imported where there are some, because that takes a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every process must call it. One that is not spread is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(target: Tensor, tensor: Tensor) -> Tensor:
    """This process's part of a whole tensor, spread as `target` is; one that is spread already, as it is. No process
    waits.
    """
    if not isinstance(target, DTensor) or isinstance(tensor, DTensor) or target.shape != tensor.shape:
        return tensor
    return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def on_disk(named: Iterable[tuple[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """Tensors whose memory is a file that has no name any more: the system keeps in memory what there is room for.

    Raises:
        OSError: no room in `folder`, or no permission.
    """
    found: dict[str, Tensor] = {}
    path = folder / ".gathered"
    for name, tensor in named:
        if tensor.numel() == 0:
            found[name] = tensor.cpu()
            continue
        path.write_bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(
            tensor.shape
        )
        path.unlink()
    return found
