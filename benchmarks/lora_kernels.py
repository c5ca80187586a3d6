"""Find the fastest settings of vLLM's LoRA kernels for few tokens on this GPU, and write them to the folder that
`lora_hotswap` uses.

    # about two minutes; writes src/offline_grpo/engine/inside_vllm/lora_kernels/GPU_*.json
    python benchmarks/lora_kernels.py

vLLM's own settings are tuned for many tokens: blocks of 32 and 64 rows, and of 32 ranks. But a single stream has one
row and an adapter has rank 16. A decoding step of a small model then spends a quarter of its time in these kernels. The
files are in vLLM's format (VLLM_TUNED_CONFIG_FOLDER).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import Target, write_result
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

FOLDER = Path(__file__).parents[1] / "src/offline_grpo/engine/inside_vllm/lora_kernels"
NUM_LAYERS = 24
MODULES = {"qkv": (896, [896, 128, 128]), "o": (896, [896]), "gate_up": (896, [4864, 4864]), "down": (4864, [896])}
"""Input and output sizes of Qwen2.5-0.5B, for which the result is reported."""
SIZES = (512, 896, 1536, 2048, 3584, 4864, 8960, 14336)
RANKS = (16, 64)
SLICES = (1, 2, 3)
FEW = (1, 16)
MANY = (64, 256)
"""Numbers of tokens: FEW are tuned, MANY keep vLLM's settings. vLLM uses the entry with the nearest number."""
GAIN = 0.98
Config = dict[str, int | None]


def main() -> None:
    shrink, expand = tuned_files()
    measured: dict[str, float] = {}
    for module, (size, outputs) in MODULES.items():
        ours = (
            lookup(shrink, len(outputs), size, 16),
            lookup(expand, len(outputs), 16, max(outputs)),
        )
        for name, configs in (("default", (None, None)), ("tuned", ours)):
            measured[f"{module}_{name}_us"] = time_us(size, outputs, 16, *configs)
    totals = {name: sum(measured[f"{module}_{name}_us"] for module in MODULES) for name in ("default", "tuned")}
    measured |= {f"layer_{name}_us": total for name, total in totals.items()} | {
        "tuned_vs_default": totals["tuned"] / totals["default"]
    }
    write_result(
        "lora_kernels",
        claim="LoRA kernels of one layer of Qwen2.5-0.5B, rank 16, one token, in a CUDA graph: tuned against "
        "vLLM's settings",
        targets=[Target("tuned_vs_default", "<=", 0.8)],
        settings={"sizes": SIZES, "ranks": RANKS, "slices": SLICES},
        measured=measured,
        details={},
    )

    # Last, because they change the tree whose state is in the result.
    FOLDER.mkdir(exist_ok=True)
    gpu = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    for kind, table in (("SHRINK", shrink), ("EXPAND_TRUE", expand)):
        (FOLDER / f"{gpu}_{kind}.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


def tuned_files() -> tuple[dict[str, Any], dict[str, Any]]:
    """[max_loras + 1][slices][tokens][k][n] -> settings, for both kernels. Layers with more than three slices use those
    for three.
    """
    shrink: dict[str, Any] = {}
    expand: dict[str, Any] = {}
    for slices, size, rank in itertools.product(SLICES, SIZES, RANKS):
        outputs = [size] * slices
        best_shrink = fastest(
            "shrink", shrink_candidates(), lambda c, o=outputs, s=size, r=rank: time_us(s, o, r, c, None, only="shrink")
        )
        best_expand = fastest(
            "expand", expand_candidates(), lambda c, o=outputs, s=size, r=rank: time_us(s, o, r, None, c, only="expand")
        )
        for tokens in FEW:
            put(shrink, slices, tokens, size, rank, best_shrink or default("shrink", 1, size, rank, slices))
            put(expand, slices, tokens, rank, size, best_expand or default("expand", 1, size, rank, slices))
        for many in MANY:
            put(shrink, slices, many, size, rank, default("shrink", many, size, rank, slices))
            put(expand, slices, many, rank, size, default("expand", many, size, rank, slices))
    for table in (shrink, expand):
        table["2"] |= {str(more): table["2"]["3"] for more in range(4, 9)}
    return shrink, expand


def put(table: dict[str, Any], slices: int, tokens: int, k: int, n: int, config: Config) -> None:
    table.setdefault("2", {}).setdefault(str(slices), {}).setdefault(str(tokens), {}).setdefault(str(k), {})[str(n)] = (
        config
    )


def lookup(table: dict[str, Any], slices: int, k: int, n: int) -> Config:
    return table["2"][str(slices)][str(FEW[0])][str(k)][str(n)]


def default(kind: str, tokens: int, size: int, rank: int, slices: int) -> Config:
    return dict(
        get_lora_op_configs(
            kind, max_loras=2, batch=tokens, hidden_size=size, rank=rank, num_slices=slices, add_inputs=True
        )
    )


def shrink_candidates() -> Iterator[Config]:
    common = {"block_m": 16, "block_n": 16, "num_ctas": 1, "group_size_m": 8, "num_stages": 2, "max_nreg": None}
    for block_k, split_k in itertools.product((128, 256), (4, 8, 16, 32, 64)):
        yield {**common, "block_k": block_k, "split_k": split_k, "num_warps": 4}


def expand_candidates() -> Iterator[Config]:
    common = {"block_m": 16, "block_k": 16, "num_ctas": 1, "num_stages": 1, "max_nreg": None}
    for block_n, num_warps in itertools.product((32, 64, 128), (2, 4)):
        yield {**common, "block_n": block_n, "num_warps": num_warps}


def fastest(kind: str, candidates: Iterator[Config], measure: Callable[[Config | None], float]) -> Config | None:
    """The fastest candidate, or None if none is faster than vLLM's settings."""
    times = [(measure(candidate), candidate) for candidate in candidates]
    best_us, best = min(times, key=lambda pair: pair[0])
    default_us = measure(None)
    print(f"{kind}: {default_us:.2f} -> {best_us:.2f} us", best, flush=True)
    return best if best_us < GAIN * default_us else None


def time_us(
    size: int, outputs: list[int], rank: int, shrink: Config | None, expand: Config | None, only: str = ""
) -> float:
    """Microseconds per adapted layer for one token, in a CUDA graph of 24 layers with separate weights. None uses
    vLLM's settings.
    """
    setattr(lora_shrink_op, "get_lora_op_configs", lambda *a, **k: shrink or get_lora_op_configs(*a, **k))  # noqa: B010
    setattr(lora_expand_op, "get_lora_op_configs", lambda *a, **k: expand or get_lora_op_configs(*a, **k))  # noqa: B010
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    first = [[torch.randn(1, 1, rank, size, **bf16) for _ in outputs] for _ in range(NUM_LAYERS)]
    second = [[torch.randn(1, 1, output, rank, **bf16) for output in outputs] for _ in range(NUM_LAYERS)]
    x, y = torch.randn(1, size, **bf16), torch.zeros(1, sum(outputs), **bf16)
    between = torch.zeros(len(outputs), 1, rank, device="cuda")
    meta = LoRAKernelMeta.make(1, 64, "cuda")
    meta.prepare_tensors(torch.zeros(1, dtype=torch.int32))

    def layers() -> None:
        for a, b in zip(first, second, strict=True):
            if only != "expand":
                lora_shrink_op._lora_shrink(x, a, between, *meta.meta_args(1, False), 1.0)
            if only != "shrink":
                lora_expand_op._lora_expand(between, b, y, *meta.meta_args(1, False), offset_start=0, add_inputs=True)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return min(replay_us(graph) for _ in range(3)) / NUM_LAYERS


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 10) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats * 1000


if __name__ == "__main__":
    main()
