"""The trainer alone with `train.sharding=fsdp2`, on 1, 2, ... GPUs: tokens per second, memory, and how much of N times
one GPU it reaches.

    # Qwen3-4B's shape, about four minutes on two H200
    python benchmarks/sharding.py --processes 1 2
    python benchmarks/sharding.py --processes 1 2 --shape tiny --device cpu    # seconds; says nothing about speed

Random weights, bf16 with fp32 masters, AdamW. Every process gets `--sequences` sequences of `--length` tokens, 512 of
them the prompt, one to a microbatch, with every block recomputed. An update is timed: forward, backward, step. First
all numbers of processes make one update of the same batch, and must have the same gradient norm. Blocks are compiled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Target, environment, expect_made_up_logprobs, parser_of, write_result

GATE = 0.02  # of gradient norms, relative: bf16's rounding
SKEWED = [min(16384, 200 + int(random.Random(i).expovariate(1 / 2000))) for i in range(256)]


def measure(args: argparse.Namespace) -> None:
    """One process of a group; the first one writes `args.inside`."""
    import torch
    from our_trainer import make_updater
    from shapes import SIZES
    from train_speed import make_batch
    from transformers import AutoModelForCausalLM

    from offline_grpo.model.layouts import layouts_for
    from offline_grpo.model.lm_head import TiledHead
    from offline_grpo.model.policy import Policy
    from offline_grpo.model.proof import settle_compile
    from offline_grpo.model.scoring import Scoring
    from offline_grpo.model.tiny import build_char_tokenizer
    from offline_grpo.placement.ranks import Ranks
    from offline_grpo.train.fsdp2 import FullyShardedPolicy

    expect_made_up_logprobs()
    on_gpu = args.device == "cuda"
    ranks = Ranks(use_cpu=not on_gpu)
    device = torch.device("cuda", ranks.local_rank) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(SIZES[args.shape], dtype=dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(
        Scoring(model, layouts_for(None, device, dtype)[0], TiledHead(tile_width=None)), build_char_tokenizer(40960)
    )
    started = time.monotonic()
    settle_compile(policy.scoring, True, device)
    compile_s = time.monotonic() - started
    sharding = FullyShardedPolicy(ranks)
    sharding.prepare(policy)
    lengths = {"tokens_per_microbatch": args.length, "max_new_tokens": args.length}
    how: dict[str, Any] = {"precision": "bf16" if on_gpu else "fp32", "checkpointing": True, **lengths}
    updater = make_updater(policy, **how, lr=1e-6, clip_high=0.28, sharding=sharding)
    prompt = min(512, args.length // 8)
    batch = make_batch([args.length - prompt] * max(args.processes), prompt=prompt, vocab_size=model.config.vocab_size)
    norm = updater.run(batch, iteration=0)["grad_norm"]
    num_sequences = args.sequences * ranks.world_size
    batch = make_batch([args.length - prompt] * num_sequences, prompt=prompt, vocab_size=model.config.vocab_size)
    seconds = []
    for i in range(args.rounds + 1):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        ranks.gather([0])  # all begin together
        started = time.monotonic()
        updater.run(batch, iteration=i)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    slowest = max(ranks.gather([statistics.median(seconds[1:])]))
    peaks = ranks.gather([peak])
    if ranks.is_main:
        found = {"s": slowest, "tok_s": num_sequences * args.length / slowest, "peak_gib": max(peaks)}
        found["compile_s"] = compile_s
        Path(args.inside).write_text(json.dumps(found | {"grad_norm": norm, "rounds_s": seconds}))


def run_group(number: int) -> dict[str, Any]:
    """This script in a group of processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        command = [*launch, __file__, *sys.argv[1:], "--inside", str(path)]
        subprocess.run(command, check=True, env=environment())
        return json.loads(path.read_text())


def most_loaded(number: int) -> float:
    """Of N processes, the tokens of the busiest divided by the mean, on completions of skewed length."""
    from offline_grpo.train.batch import share_of_rank

    loads = [
        sum(SKEWED[s] for s in share_of_rank(range(len(SKEWED)), SKEWED, rank=rank, world_size=number))
        for rank in range(number)
    ]
    return max(loads) * number / sum(loads)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=4, help="of each process, in an update")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="sharding")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu":
        args.length = min(args.length, 64)
    if args.inside:
        measure(args)
        return
    found = {number: run_group(number) for number in args.processes}
    norms = [result["grad_norm"] for result in found.values()]
    assert max(norms) / min(norms) - 1 <= GATE, f"gradient norms of {args.processes} processes differ: {norms}"
    measured: dict[str, float] = {}
    first, last = min(args.processes), max(args.processes)
    for number, result in found.items():
        measured |= {f"compiled_{number}_{key}": result[key] for key in ("tok_s", "peak_gib", "compile_s")}
        measured[f"compiled_{number}_efficiency"] = result["tok_s"] * first / (found[first]["tok_s"] * number)
    measured |= {f"most_loaded_{number}": most_loaded(number) for number in args.processes}
    targets = [Target(f"compiled_{last}_efficiency", ">=", 0.9), Target(f"most_loaded_{last}", "<=", 1.1)]
    write_result(
        args.out,
        claim="FSDP2 on N GPUs trains at least 0.9 N times the tokens per second of one GPU, and shares skewed "
        "lengths out evenly",
        targets=targets,
        settings={key: value for key, value in vars(args).items() if key != "inside"},
        measured=measured,
        details={"compiled": found},
    )


if __name__ == "__main__":
    main()
