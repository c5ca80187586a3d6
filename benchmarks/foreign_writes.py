"""What it costs to see that nobody else has written to the weights that a run shares with its server.

    # one CUDA GPU, or the CPU: 1.5 B parameters in bf16, random
    python benchmarks/foreign_writes.py
    python benchmarks/foreign_writes.py --layers 4            # less memory: 9 bytes per parameter are needed

Needs torch and transformers alone. Arms, timed in alternation, medians over the rounds:
    check        MasterWeights.differing, of all parameters: after sampling, before every optimizer step, at a push and
                 at a checkpoint
    fingerprint  64 bits of every parameter: once per push, by trainer and server, and at each check of the parameters
                 that are not trained
    publish      MasterWeights.publish, which every update does: it moves the bytes that `check` reads
The floor of an arm is its bytes divided by the speed at which the same device adds up a large float32 tensor, measured
in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints
from offline_grpo.model.masters import MasterWeights

SHAPE: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
READ_BYTES = 2**30


def main() -> None:
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(arguments.layers, getattr(torch, arguments.dtype), device)
    masters = MasterWeights(model.named_parameters(), separate=True)
    weights = [parameter.detach() for parameter in model.parameters()]
    check_that_it_sees(masters, weights)
    num_bytes = sum(weight.nbytes for weight in weights)
    both = num_bytes + sum(master.nbytes for master in masters.parameters.values())
    read = torch.ones(READ_BYTES // 4, device=device)
    arms: dict[str, tuple[int, Callable[[], Any]]] = {
        "check": (both, masters.differing),
        "fingerprint": (num_bytes, lambda: fingerprints(weights)),
        "publish": (both, masters.publish),
        "read": (READ_BYTES, lambda: read.sum()),
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    seconds = time_all({name: act for name, (_, act) in arms.items()}, arguments.rounds)
    measured = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "num_threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "num_parameters": sum(weight.numel() for weight in weights),
        "num_tensors": len(weights),
        "peak_temporaries_mib": (torch.cuda.max_memory_allocated() - before) / 2**20 if device.type == "cuda" else None,
        "read_gb_per_s": READ_BYTES / statistics.median(seconds["read"]) / 1e9,
        "arms": {},
    }
    print(
        f"\n{measured['device']}: {measured['num_parameters'] / 1e9:.2f} B parameters, {arguments.dtype}, torch {torch.__version__}"
    )
    print(
        f"reads {measured['read_gb_per_s']:.0f} GB/s; temporaries of all arms {measured['peak_temporaries_mib']} MiB\n"
    )
    print("| arm | bytes, GB | median, ms | floor, ms | times floor | share of a 10 s iteration with 2 updates |")
    print("|---|---|---|---|---|---|")
    for name, (size, _) in list(arms.items())[:-1]:
        median_s, floor_s = statistics.median(seconds[name]), size / READ_BYTES * statistics.median(seconds["read"])
        measured["arms"][name] = {"bytes": size, "median_s": median_s, "floor_s": floor_s, "rounds_s": seconds[name]}
        share = (
            {"check": 5, "fingerprint": 1, "publish": 2}[name] * median_s / 10
        )  # 5: sampled, scored, two updates, pushed
        cells = (
            f"{size / 1e9:.2f}",
            f"{median_s * 1e3:.2f}",
            f"{floor_s * 1e3:.2f}",
            f"{median_s / floor_s:.1f}",
            f"{share:.2%}",
        )
        print(f"| {' | '.join((name, *cells))} |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(measured, indent=2) + "\n")
        print(f"\nwritten to {arguments.out}")


def make_model(layers: int, dtype: torch.dtype, device: torch.device) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_hidden_layers=layers, vocab_size=151936, tie_word_embeddings=True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)


@torch.no_grad()
def check_that_it_sees(masters: MasterWeights, weights: list[torch.Tensor]) -> None:
    """One changed bit in the last place of the largest tensor, and only there, is seen by both."""
    largest = max(range(len(weights)), key=lambda i: weights[i].numel())
    prints = fingerprints(weights)
    assert masters.differing() == []
    bits = weights[largest].view(-1).view(torch.int16 if weights[largest].element_size() == 2 else torch.int32)
    bits[-1] ^= 1
    assert masters.differing() == [list(masters.parameters)[largest]]
    assert [i for i, (old, new) in enumerate(zip(prints, fingerprints(weights), strict=True)) if old != new] == [
        largest
    ]
    masters.publish()
    assert masters.differing() == []
    assert fingerprints(weights) == prints


def time_all(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-1, rounds):  # the first one warms up
        for name, act in arms.items():
            wait()
            started = time.perf_counter()
            act()
            wait()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
