"""What trainer and worker must do alike: which rows of which tensor of vLLM's are which parameter of the checkpoint,
fingerprints (two weights that hold the same bits have the same), and the group over which weights are broadcast.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn

BATCH_WORDS, PIECE_WORDS = 1 << 25, 1 << 18
"""What is added up at once: on GPUs what a launch gets, of which some may be copies; on CPUs what fits into a cache."""
c10d: Any = distributed  # whose stubs lack some of it
Described = Sequence[Any]
"""Name, dtype and shape of a tensor."""
ALIGNED_BYTES = 16


# Rows


def layout(model: nn.Module, *, is_spread: bool = False) -> Iterator[dict[str, Any]]:
    """One entry for each checkpoint parameter: the tensor that holds it, and its rows there; and of tensor parallel
    models which rows or columns (`dim`) of the parameter these are: those from `start` on, of `whole`.

    Fused tensors are taken apart by what vLLM's own layer classes say about them. All parts are ranges of rows.

    Args:
        is_spread: over several workers. There is no entry then where only a loader knows what a worker has.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    # What transformers calls a module of a composite says vLLM's own map for loading, backwards.
    prefixes: Any = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {})
    prefixes = prefixes if hasattr(model, "get_language_model") else {}
    for path, module in model.named_modules(remove_duplicate=False):
        dotted = f"{plain_name(path)}."
        found = [old + dotted.removeprefix(new) for old, new in prefixes.items() if new and dotted.startswith(new)]
        own_path = max(found, key=len, default=dotted)[:-1]  # shorter ones are names of older checkpoints
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            prefix, _, fused = own_path.rpartition(".")
            tensor = f"{plain_name(path)}.{leaf}" if path else leaf
            loader = getattr(parameter, "weight_loader", None)
            if is_spread and loader is not None and getattr(loader, "__self__", None) is not module:
                continue
            for name, row, rows, *place in _parts(module, packed.get(fused, []), parameter):
                own = ".".join(filter(None, [prefix, name or fused, leaf]))
                shape = [rows, *parameter.shape[1:]] if parameter.dim() else []
                entry = {"name": own, "tensor": tensor, "row": row, "rows": rows, "shape": shape}
                yield entry | dict(zip(("dim", "start", "whole"), place, strict=True))


def _parts(module: Any, names: list[str], parameter: Tensor) -> Iterator[tuple[Any, ...]]:
    """(name of a module in the checkpoint, first row, rows, dim, start, whole), for a tensor of `module` that may hold
    several.
    """
    # By name: vLLM's classes cannot be imported where the trainer is. This worker is `rank` of `size`.
    kinds = {cls.__name__ for cls in type(module).__mro__}
    size, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if "QKVParallelLinear" in kinds and len(names) == 3:
        for name, part in zip(names, "qkv", strict=True):
            rows, copies = module._get_shard_size_mapping(part), 1 if part == "q" else module.num_kv_head_replicas
            yield name, module._get_shard_offset_mapping(part), rows, 0, rank // copies * rows, rows * size // copies
    elif "MergedColumnParallelLinear" in kinds and len(names) > 1:
        if len(names) != len(module.output_sizes):  # Qwen3.5: which rows are which only its loader knows
            return
        row = 0
        for name, whole in zip(names, module.output_sizes, strict=True):
            rows = whole // size
            yield name, row, rows, 0, rank * rows, whole
            row += rows
    elif "VocabParallelEmbedding" in kinds:
        own = module.shard_indices  # rows beyond it are padding
        begin, end = own.org_vocab_start_index, own.org_vocab_end_index
        yield None, 0, end - begin, 0, begin, module.org_vocab_size
    elif "RowParallelLinear" in kinds and parameter.dim() > 1:
        yield None, 0, len(parameter), 1, rank * parameter.shape[1], parameter.shape[1] * size
    elif size == 1 or "ColumnParallelLinear" not in kinds:
        rows = parameter.shape[0] if parameter.dim() else 1
        yield None, 0, rows, 0, 0, rows
    elif len(getattr(module, "output_sizes", ())) <= 1:  # else fused in the checkpoint too
        yield None, 0, len(parameter), 0, rank * len(parameter), len(parameter) * size


def plain_name(name: str) -> str:
    """Without the level that LoRA wrappers add, vLLM's and peft's alike."""
    return name.replace(".base_layer", "")


# Fingerprints


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on every bit of it and on its place; equal on CPUs and GPUs.

    The sum over the tensor's bytes, taken as 64-bit integers x[i], of x[i] * (2 i + 1), modulo 2**64. A tensor whose
    bytes are no multiple of 8 is taken as integers of its elements' size.
    """
    return texts(totals((tensor, 0) for tensor in tensors))


def texts(totals: Tensor) -> list[str]:
    """Fingerprints as they are written: 16 hexadecimal digits each."""
    return [f"{total & (2**64 - 1):016x}" for total in totals.tolist()]


def totals(parts: Iterable[tuple[Tensor, int]]) -> Tensor:
    """[N] int64: the sums of `fingerprints`, on the tensors' device, which this does not wait for.

    Args:
        parts: tensors, and i of the first word of each: where a part of a tensor begins in all of it. The sums of all
            parts add up to that of the tensor.
    """
    # Several at once, because a launch on a GPU takes longer than to read a small tensor.
    found: list[Tensor] = []
    batch: list[tuple[Tensor, int]] = []
    size = 0
    for tensor, first in parts:
        words = _words(tensor.detach())
        if batch and size + len(words) > BATCH_WORDS:
            found.append(_totals(batch))
            batch, size = [], 0
        batch.append((words, first))
        size += len(words)
    return torch.cat([*found, _totals(batch)]) if batch else torch.zeros(0, dtype=torch.int64)


def as_part(tensor: Tensor, dim: int, start: int, whole: int) -> tuple[Tensor, int]:
    """What `totals` takes of `whole` rows or columns (`dim`) those from `start` on: zeros stand in for the others where
    these are no run of whole words.
    """
    if len(tensor) == 0 or tensor.shape[dim] == whole:
        return tensor, 0
    row_bytes = tensor[0].nbytes
    if dim == 0 and all(rows * row_bytes % 8 == 0 for rows in (start, len(tensor), whole)):
        return tensor, start * row_bytes // 8
    shape = [*tensor.shape[:dim], whole, *tensor.shape[dim + 1 :]]
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return padded, 0


def sums(tensors: Sequence[Tensor]) -> list[str]:
    """64 bits for each tensor that depend on its numbers and not on their order: the sum of their bits, taken as
    integers.
    """
    of_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = [tensor.detach().view(of_size[tensor.element_size()]).sum() for tensor in tensors]
    return texts(torch.stack(found)) if found else []


def _words(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1)
    several = 8 // raw.element_size()
    if raw.numel() % several == 0:
        # 64 bits begin at multiples of 8 bytes alone
        return (raw.clone() if raw.storage_offset() % several else raw).view(torch.int64)
    return raw.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[raw.element_size()])


def _totals(batch: Sequence[tuple[Tensor, int]]) -> Tensor:
    """[N] int64."""
    if batch[0][0].is_cuda:
        return import_module(__name__.replace("_weights", "_fingerprint_kernel")).add_up(batch)  # needs Triton
    odd = torch.arange(1, 2 * PIECE_WORDS, 2)
    found = torch.zeros(len(batch), dtype=torch.int64)
    for total, (words, first) in zip(found, batch, strict=True):
        for number, piece in enumerate(words.split(PIECE_WORDS)):
            total += (piece * odd[: len(piece)]).sum() + piece.sum() * (2 * (first + number * PIECE_WORDS))
    return found


# Broadcasts, a bucket at a time


def meet(address: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    """A process group over NCCL, apart from those that trainer and server have; over gloo on CPUs, where tests form it.
    Returns when all ranks have come.

    Args:
        address: of rank 0, which alone listens there.
    """
    # Rank 0 listens at this address alone: the store's own socket would listen at all.
    listener = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family).detach()
    store = c10d.TCPStore(address, port, world_size, rank == 0, wait_for_workers=False, master_listen_fd=listener)
    if device.type == "cpu":
        return c10d.ProcessGroupGloo(store, rank, world_size, timedelta(minutes=1))

    # NCCL connects at the first broadcast, which all ranks take part in.
    with torch.cuda.device(device):
        group = c10d.ProcessGroupNCCL(store, rank, world_size, c10d.ProcessGroupNCCL.Options())
        group.broadcast(torch.zeros(1, device=device), 0).wait()
        torch.cuda.synchronize(device)
    return group


def empty_bucket(described: Sequence[Described], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory for several tensors, and the tensors in it."""
    dtypes = [getattr(torch, dtype) for _, dtype, _ in described]
    sizes = [math.prod(shape) * dtype.itemsize for (_, _, shape), dtype in zip(described, dtypes, strict=True)]
    areas = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    flat = torch.empty(sum(areas), dtype=torch.uint8, device=device)
    tensors = [
        area[:size].view(dtype).view(shape)
        for area, size, dtype, (_, _, shape) in zip(flat.split(areas), sizes, dtypes, described, strict=True)
    ]
    return flat, tensors
