"""Which rows of which tensor of vLLM's are which parameter of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def layout(model: nn.Module) -> Iterator[dict[str, Any]]:
    """One entry for each checkpoint parameter: the tensor that holds it, and its rows there.

    Fused tensors are taken apart by what vLLM's own layer classes say about them. All parts are ranges of rows.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            prefix, _, fused = _checkpoint_name(model, plain_name(path)).rpartition(".")
            tensor = f"{plain_name(path)}.{leaf}" if path else leaf
            for name, row, rows in _parts(module, packed.get(fused, []), parameter):
                own = ".".join(filter(None, [prefix, name or fused, leaf]))
                shape = [rows, *parameter.shape[1:]] if parameter.dim() else []
                yield {"name": own, "tensor": tensor, "row": row, "rows": rows, "shape": shape}


def _checkpoint_name(model: nn.Module, path: str) -> str:
    """What transformers calls a module of a composite: vLLM's own map for loading, backwards."""
    if not hasattr(model, "get_language_model"):
        return path
    prefixes: Any = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {})
    dotted = f"{path}."
    found = [old + dotted.removeprefix(new) for old, new in prefixes.items() if new and dotted.startswith(new)]
    return max(found, key=len, default=dotted)[:-1]  # shorter ones are names of older checkpoints


def _parts(module: nn.Module, names: list[str], parameter: Tensor) -> Iterator[tuple[str | None, int, int]]:
    """(name of a module in the checkpoint, first row, rows), for a tensor of `module` that may hold several."""
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if "QKVParallelLinear" in kinds and len(names) == 3:
        for name, part in zip(names, "qkv", strict=True):
            yield name, module._get_shard_offset_mapping(part), module._get_shard_size_mapping(part)  # type: ignore[operator]
    elif "MergedColumnParallelLinear" in kinds and len(names) > 1:
        if len(names) != len(module.output_sizes):  # type: ignore[arg-type]  # Qwen3.5: which rows are which only its loader knows
            return
        row = 0
        for name, rows in zip(names, module.output_sizes, strict=True):  # type: ignore[arg-type]
            yield name, row, rows
            row += rows
    elif "VocabParallelEmbedding" in kinds:
        yield None, 0, module.org_vocab_size  # type: ignore[misc]  # rows beyond it are padding
    else:
        yield None, 0, parameter.shape[0] if parameter.dim() else 1


def plain_name(name: str) -> str:
    """Without the level that LoRA wrappers add, vLLM's and peft's alike."""
    return name.replace(".base_layer", "")
