"""Which rows of which tensor of vLLM's are which parameter of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def layout(model: nn.Module, *, is_spread: bool = False) -> Iterator[dict[str, Any]]:
    """One entry for each checkpoint parameter: the tensor that holds it, and its rows there; and of tensor parallel
    models which rows or columns (`dim`) of the parameter these are: those from `start` on, of `whole`.

    Fused tensors are taken apart by what vLLM's own layer classes say about them. All parts are ranges of rows.

    Args:
        is_spread: over several workers. There is no entry then where only a loader knows what a worker has.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            prefix, _, fused = _checkpoint_name(model, plain_name(path)).rpartition(".")
            tensor = f"{plain_name(path)}.{leaf}" if path else leaf
            loader = getattr(parameter, "weight_loader", None)
            if is_spread and loader is not None and getattr(loader, "__self__", None) is not module:
                continue
            for name, row, rows, *place in _parts(module, packed.get(fused, []), parameter):
                own = ".".join(filter(None, [prefix, name or fused, leaf]))
                shape = [rows, *parameter.shape[1:]] if parameter.dim() else []
                entry = {"name": own, "tensor": tensor, "row": row, "rows": rows, "shape": shape}
                yield entry | dict(zip(("dim", "start", "whole"), place, strict=True))


def _checkpoint_name(model: nn.Module, path: str) -> str:
    """What transformers calls a module of a composite: vLLM's own map for loading, backwards."""
    if not hasattr(model, "get_language_model"):
        return path
    prefixes: Any = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {})
    dotted = f"{path}."
    found = [old + dotted.removeprefix(new) for old, new in prefixes.items() if new and dotted.startswith(new)]
    return max(found, key=len, default=dotted)[:-1]  # shorter ones are names of older checkpoints


def _parts(module: Any, names: list[str], parameter: Tensor) -> Iterator[tuple[Any, ...]]:
    """(name of a module in the checkpoint, first row, rows, dim, start, whole), for a tensor of `module` that may hold
    several.
    """
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
