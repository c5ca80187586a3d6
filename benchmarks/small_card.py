"""An 8B model on cards of 24 and 16 GB, as NF4 base weights make it possible: run_grpo.py under a cap on one GPU.

    python benchmarks/small_card.py WORK                        # the shape of Llama-3.1-8B, about 3 minutes an arm
    python benchmarks/small_card.py WORK --arms nf4_server      # one arm; those that ran before are in the result too
    python benchmarks/small_card.py WORK --small --arms nf4 lora    # a tiny model on the CPU

Random weights in bf16, adapters of rank 16 on all linear layers, 8 problems x 8 completions x 256 tokens an iteration,
one update, every block recomputed. Each arm is a run in its own process.

    nf4_server     model.quantization=nf4 beside a vLLM server that holds its base in 4 bits too, 22 GiB in all
    nf4            the same model sampled in process, 16 GiB
    lora_server    16-bit base weights beside a 16-bit server, without a cap
    lora           16-bit base weights, sampled in process, without a cap

The trainer cannot allocate more than its part of a cap (torch.cuda.set_per_process_memory_fraction), and the server's
KV cache has a fixed size. `peak_gib` is what nvidia-smi shows for the whole card, sampled while the arm runs, contexts
and loading included, less what others used before; `card_gib` the most that the run itself saw there. Tokens per second
are medians over the iterations but the first.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from common import Target, environment, make_model, parser_of, print_ends, records_of, run_command, write_result

CAPS_GIB = {"nf4_server": 22.0, "nf4": 16.0}
ARMS = ("nf4_server", "nf4", "lora_server", "lora")
CONTEXT_GIB = 0.75  # of a process on the GPU, beside what torch allocates
WARMUP = 1
CAPPED = """
import runpy, sys, torch
if (fraction := float(sys.argv[1])) < 1:
    torch.cuda.set_per_process_memory_fraction(fraction)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(work: Path, args: argparse.Namespace, arm: str) -> list[str]:
    """Of the run, in a Python whose memory is limited."""
    has_server = arm.endswith("_server")
    card_gib: float = args.card_gib
    trainer_gib = CAPS_GIB.get(arm, card_gib) - CONTEXT_GIB - has_server * (args.server_gib + CONTEXT_GIB)
    share = args.server_gib if arm in CAPS_GIB else args.server_gib + 12  # 16 bits take 10 GiB more
    words = [f"train.tokens_per_microbatch={args.microbatch}", "train.gradient_checkpointing=true"]
    words += ["model/lora=default", "data.shuffle=false", "train.precision=bf16"]
    words += ["model.quantization=nf4"] if arm.startswith("nf4") else []
    if has_server:
        words += ["generation=vllm_server", "weight_sync=lora_hotswap", "engine.args.max_model_len=1024"]
        words += [f"+engine.args.kv_cache_memory_bytes={int(args.kv_gib * 2**30)}"]
        words += [f"engine.args.gpu_memory_utilization={share / card_gib:.3f}", "engine.args.max_num_seqs=64"]
        words += ["+engine.args.max_num_batched_tokens=2048"]  # what the server's largest step takes is not KV cache
    else:
        words += ["generation.batch_size=64"]
    words += ["model.device=cpu"] if args.small else []
    fraction = min(1.0, trainer_gib / card_gib) if arm in CAPS_GIB and not args.small else 1.0
    return [sys.executable, "-c", CAPPED, str(fraction), *run_command(work, args, work / arm, *words)]


def used_gib(card: str) -> float:
    """On the card of this UUID, by all processes; 0 without one."""
    query = ["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024
    except (OSError, subprocess.CalledProcessError):
        return 0.0


def run(work: Path, args: argparse.Namespace, arm: str) -> int:
    """Returns the exit code; WORK/ARM.json gets the peak."""
    before, peak, is_over = used_gib(args.card), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.1):
            peak = max(peak, used_gib(args.card) - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with (work / f"{arm}.log").open("w") as log:
        done = subprocess.run(
            command(work, args, arm), env=environment(), stdout=log, stderr=subprocess.STDOUT, check=False
        )
    is_over.set()
    watcher.join()
    (work / f"{arm}.json").write_text(json.dumps({"peak_gib": peak}))
    return done.returncode


def result_of(work: Path, arm: str) -> dict[str, Any]:
    """What the run's metrics and its memory plan say."""
    records = records_of(work / arm)
    plan = re.findall(r"predicted to hold ([\d.]+) GiB", (work / arm / "run.log").read_text())
    names = ("perf/tokens_per_s", "perf/generate_tokens_per_s", "perf/train_tokens_per_s", "time/iteration_s")
    names += ("sync/probe_diff_abs_mean", "sync/num_tensors_proven", "time/sync_s", "mismatch/ess_frac")
    names += ("alignment/diff_abs_mean",)
    found = {
        name.rpartition("/")[2]: statistics.median(record[name] for record in records[WARMUP:])
        for name in names
        if name in records[-1]
    }
    for name, key in (("trainer_gib", "perf/gpu_memory_gb"), ("card_gib", "perf/gpu_memory_card_gb")):
        found[name] = max(record.get(key, 0.0) for record in records) * 1e9 / 2**30
    found["predicted_gib"] = float(plan[-1]) if plan else 0.0
    return found | json.loads((work / f"{arm}.json").read_text())


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "small_card")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--microbatch", type=int, default=4096, help="tokens")
    parser.add_argument("--server-gib", type=float, default=10.0, help="of the server with 4 bits, KV cache included")
    parser.add_argument("--kv-gib", type=float, default=2.0)
    args = parser.parse_args()
    if args.small:
        args.shape, args.prompts, args.tokens, args.iterations, args.kv_gib = "small", 2, 8, 3, 0.0625
    return args


def main() -> None:
    import torch

    args = parse()
    has_gpu = torch.cuda.is_available()
    about: Any = torch.cuda.get_device_properties(0) if has_gpu else None  # of the first card that is visible
    args.card_gib, args.card = (about.total_memory / 2**30, f"GPU-{about.uuid}") if has_gpu else (80.0, "")
    work = args.work.resolve()
    make_model(work, args.shape, small=args.small)
    failed = [arm for arm in args.arms if run(work, args, arm) != 0]
    print_ends(work, failed)
    found = {arm: result_of(work, arm) for arm in ARMS if records_of(work / arm)}
    measured = {f"{arm}_{name}": value for arm, result in found.items() for name, value in result.items()}
    for suffix in ("", "_server"):
        if {f"nf4{suffix}", f"lora{suffix}"} <= found.keys():
            for name in ("tokens_per_s", "train_tokens_per_s", "generate_tokens_per_s"):
                measured[f"nf4{suffix}_vs_lora_{name}"] = found[f"nf4{suffix}"][name] / found[f"lora{suffix}"][name]
    write_result(
        args.out,
        claim="The shape of Llama-3.1-8B trains in 22 GiB with a server beside it, and in 16 GiB in process",
        targets=[Target(f"{arm}_peak_gib", "<=", cap) for arm, cap in CAPS_GIB.items() if arm in found],
        settings=args,
        measured=measured,
        details={"failed": failed},
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
