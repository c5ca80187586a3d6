"""One update on a long sequence, on 1, 2, ... GPUs that share it: tokens per second, memory, and how much of N times
one GPU it reaches.

    python benchmarks/long_context.py --processes 1 2                       # about half an hour on two H200
    python benchmarks/long_context.py --arms 4b_full --lengths 131072 -- model.mlp_tile_tokens=8192
    python benchmarks/long_context.py --processes 1 --arms 4b_full --lengths 65536 -- train.optimizer.offload=true
    python benchmarks/long_context.py --processes 1 2 --small               # on a CPU; says nothing about speed

Random weights, bf16 with fp32 masters, AdamW, every block recomputed, its inputs in the host's memory (`--offload`).
The first 512 tokens are the prompt. N processes have `train.sequence_parallel=N`, and whole models fsdp2; all numbers
of processes must have the same gradient norm. What does not fit is recorded as null. A test compares the peaks with
the memory plan.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Target, environment, expect_made_up_logprobs, parser_of, write_result

ARMS = {"0.6b_full": "0.6b", "4b_full": "4b", "4b_lora": "4b", "8b_lora": "8b", "8b_nf4": "8b"}
GATE = 0.02  # of gradient norms, relative: bf16's rounding


def measure(args: argparse.Namespace, arm: str, length: int) -> None:
    """One process of a group; the first one writes `args.inside`."""
    from model_sizes import make_policy
    from our_trainer import updater_of
    from shapes import SIZES
    from train_speed import make_batch

    from offline_grpo.config.compose import composed, register, typed
    from offline_grpo.config.parts import make_plan
    from offline_grpo.model.proof import share_sequences
    from offline_grpo.placement.ranks import Ranks
    from offline_grpo.start.memory import GIB
    from offline_grpo.train.fsdp2 import FullyShardedPolicy
    from offline_grpo.train.optimizer import is_offloaded
    from offline_grpo.train.sharding import Sharding

    expect_made_up_logprobs()
    ranks = Ranks(use_cpu=args.small)
    size, is_lora, prompt = ranks.world_size, not arm.endswith("full"), min(512, length // 8)
    device = torch.device("cpu") if args.small else torch.device("cuda", ranks.local_rank)
    spreads = size > 1 and not is_lora
    config = copy.deepcopy(SIZES["small" if args.small else ARMS[arm]])
    config.max_position_embeddings = length
    register()
    words = f"""
        model=hf model.train_id={tempfile.gettempdir()} eval.enabled=false generation.max_new_tokens={length - prompt}
        data.problems_per_iteration=1 data.rollouts_per_problem=2 train.kl_coef=0 train.lr=1e-6 train.iterations=1
        train.batch_size=1 train.precision=bf16 train.gradient_checkpointing=true
        train.activation_offload={args.offload} train.sequence_parallel={size}
        train.sharding={"fsdp2" if spreads else "none"} {"model/lora=default" if is_lora else ""}
        {"model.quantization=nf4" if arm.endswith("nf4") else ""}
    """
    plan = make_plan(typed(composed([*words.split(), *args.overrides])))
    policy = make_policy(plan, config, device, 1.0, is_shared=False)
    if size > 1:
        share_sequences(policy.scoring, ranks.neighbours(size), device)
    sharding = FullyShardedPolicy(ranks) if spreads else Sharding(ranks)
    sharding.prepare(policy)
    policy.make_masters(offload=is_offloaded(plan.optimizer))
    updater = updater_of(plan, policy, sharding)

    # The first update is not counted: it locks the host's memory, and kernels are chosen.
    batch = make_batch([length - prompt], prompt=prompt, vocab_size=config.vocab_size)
    seconds, norms = [], []
    for i in range(args.rounds + 1):
        ranks.gather([0])  # all begin together
        started = time.monotonic()
        norms.append(updater.run(batch, iteration=i)["grad_norm"])  # waits for the GPU
        seconds.append(time.monotonic() - started)
    peak = 0.0 if args.small else torch.cuda.max_memory_allocated() / GIB
    slowest, peak = max(ranks.gather([statistics.median(seconds[1:])])), max(ranks.gather([peak]))
    if ranks.is_main:
        found = {"tok_s": length / slowest, "peak_gib": peak}
        Path(args.inside).write_text(json.dumps(found | {"grad_norm": norms[0], "rounds_s": seconds}))


def run_group(number: int, arm: str, length: int, keep: str | None) -> dict[str, Any] | None:
    """This script in a group of processes; None if the memory is too small."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(keep or folder, f"{arm}_{length}_on_{number}.json")
        if path.exists():
            return json.loads(path.read_text())
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        cell = ["--inside", str(path), "--cell", arm, str(length)]
        done = subprocess.run([*launch, __file__, *cell, *sys.argv[1:]], check=False, env=environment())
        if not path.exists():
            done.check_returncode()
        return json.loads(path.read_text())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072, 262144])
    parser.add_argument("--offload", choices=("true", "false"), default="true", help="train.activation_offload")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a small model and --lengths of hundreds, on the CPU")
    parser.add_argument("--out", default="long_context")
    parser.add_argument("--keep", help="a folder: what is measured there is not measured again")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the configuration, after --")
    args = parser.parse_args()
    if args.inside:
        try:
            measure(args, args.cell[0], int(args.cell[1]))
        except torch.OutOfMemoryError:
            Path(args.inside).write_text("null")
            raise
        return
    measured, details = {}, {}
    for arm, length in ((arm, length) for arm in args.arms for length in args.lengths):
        found = {number: run_group(number, arm, length, args.keep) for number in args.processes}
        details[f"{arm}_{length}"] = found
        rows = {number: row for number, row in found.items() if row is not None}
        norms = [row["grad_norm"] for row in rows.values()]
        assert not norms or max(norms) / min(norms) - 1 <= GATE, f"gradient norms of {arm}, {length}: {norms}"
        for number, row in rows.items():
            name = f"{arm}_{length}_on_{number}"
            measured |= {f"{name}_{key}": row[key] for key in ("tok_s", "peak_gib")}
            if 1 in rows:
                measured[f"{name}_efficiency"] = row["tok_s"] / (number * rows[1]["tok_s"])
    bounds = {"0.6b_full_65536_on_1_tok_s": 10150, "4b_full_131072_on_2_efficiency": 0.85}
    write_result(
        args.out,
        claim="65,536 tokens in one sequence: at least 10,150 tokens/s with Qwen3-0.6B's shape on one GPU (prime-rl's "
        "figure on an H100); two GPUs that share 131,072 (4B in full) reach at least 0.85 of twice one",
        targets=[Target(name, ">=", bound) for name, bound in bounds.items() if name in measured],
        settings={key: value for key, value in vars(args).items() if key not in ("inside", "cell")},
        measured=measured,
        details=details,
    )


if __name__ == "__main__":
    main()
