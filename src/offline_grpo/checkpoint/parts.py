"""`checkpoint.format=sharded`: every process writes its own rows of the tensors that are spread over processes, and
reads those it needs.

    trainer/parts.pt                 masters and optimizer; for each spread tensor the text "part of spread tensor N"
    trainer/part_00000.safetensors   rank 0's rows of tensor N, under the key N; the metadata `first_rows` has the index
                                     of the first one

Plain files, and no torch.distributed.checkpoint: its index is a pickle, which may run any code when it is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_flatten, tree_unflatten

from offline_grpo.checkpoint.files import sync

PART = "part of spread tensor "
FIRSTS = "first_rows"


def save_parts(tensors: Any, folder: Path, rank: int) -> Any:
    """Write this process's rows of the spread tensors among nested dicts and lists. Called on every process.

    Returns `tensors` with a name in place of each that is spread: the same on all processes.
    """
    # Leaves come in the same order on every process, so the number of a tensor is its name in all files.
    rows: dict[str, Tensor] = {}
    firsts: dict[str, int] = {}
    leaves, structure = tree_flatten(tensors)
    spread = [place for place, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
    for number, place in enumerate(spread):
        local = leaves[place].to_local()
        if local.numel() > 0:
            rows[str(number)], firsts[str(number)] = local.contiguous(), _rows_of(leaves[place])[0]
        leaves[place] = f"{PART}{number}"
    path = folder / f"part_{rank:05d}.safetensors"
    save_file(rows, path, metadata={FIRSTS: json.dumps(firsts)})  # one key: several come in any order
    sync(path)
    return tree_unflatten(leaves, structure)


class Parts:
    """Reads what `save_parts` wrote, by any number of processes."""

    def __init__(self, folder: Path) -> None:
        self._pieces: dict[str, list[tuple[int, Any]]] = {}  # number -> first row and slice of the file, of each piece
        for path in folder.glob("part_*.safetensors"):
            file = safe_open(path, framework="pt")
            for number, first in json.loads(file.metadata()[FIRSTS]).items():
                self._pieces.setdefault(number, []).append((first, file.get_slice(number)))

    def like(self, target: Tensor, value: Any) -> Any:
        """This process's rows of the saved tensor that `value` names, all of them if `target` is whole; other values as
        they are. Raises ValueError for rows that are missing, or of another shape.
        """
        if not (isinstance(value, str) and value.startswith(PART)):
            return value
        # The rows that this process needs, piece by piece, from whichever files have them.
        first, end = _rows_of(target) if isinstance(target, DTensor) else (0, len(target))
        found: list[Tensor] = []
        for begins, piece in sorted(self._pieces.get(value.removeprefix(PART), []), key=lambda pair: pair[0]):
            length = piece.get_shape()[0]
            rows = slice(min(max(first - begins, 0), length), min(max(end - begins, 0), length))
            if rows.start < rows.stop:
                found.append(piece[rows])
        local = torch.cat(found) if found else torch.empty((0, *target.shape[1:]))
        if local.shape != (end - first, *target.shape[1:]):
            raise ValueError(f"{value}: rows {first} to {end} are {list(local.shape)}, for {list(target.shape)}")

        # As `target` is: whole, or this process's part of it.
        if not isinstance(target, DTensor):
            return local
        return DTensor.from_local(
            local.to(target.device),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )


def _rows_of(tensor: DTensor) -> tuple[int, int]:
    """This process's rows of a tensor that is spread over its first axis: the first, and the one after the last."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]
