"""Whole runs on one host of several GPUs: some train with FSDP2, each of the others has a vLLM server, `mode=async` and
`weight_sync=nccl`.

    python benchmarks/whole_run.py WORK --shape 4b --trainers 4 --servers 4     # eight GPUs, about three minutes
    python benchmarks/whole_run.py WORK --small --trainers 2 --servers 1        # a tiny model on the CPU

Random weights in bf16 with fp32 masters, which hardly ever draw the end of a sequence; one update of all completions an
iteration, sampled one iteration ahead. Results are medians over the iterations after the first two and before the last,
which has nothing to sample ahead; seconds of an iteration are means, because long and short ones may alternate.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from common import Target, environment, make_model, parser_of, records_of, run_command, write_result

WARMUP = 2
SHOWN = ("time/generate_s", "time/sampling_s", "time/train_s", "time/sync_push_s", "time/sync_proof_s")
SHOWN += ("time/sync_paused_s", "time/sync_s", "time/rollouts_wait_s", "time/async_idle_s", "async/age_mean")
SHOWN += ("mismatch/ess_frac",)
SHOWN += ("sync/num_tensors", "sync/num_tensors_proven", "perf/gpu_memory_gb", "num_completion_tokens")


def command(work: Path, args: argparse.Namespace) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.trainers)]
    words = ["generation=vllm_server", "mode=async", f"placement.num_engines={args.servers}", "train.sharding=fsdp2"]
    if args.small:
        words += ["weight_sync=reload", "train.precision=fp32", "train.tokens_per_microbatch=2048", "model.device=cpu"]
        words += ["engine.args.enforce_eager=true"]
    else:
        words += ["weight_sync=nccl", "train.precision=bf16", f"train.tokens_per_microbatch={args.microbatch}"]
        words += [f"engine.args.max_model_len={args.tokens + 512}", "engine.args.gpu_memory_utilization=0.85"]
        words += [f"placement.engine_devices={[*range(args.trainers, args.trainers + args.servers)]}"]
    return [sys.executable, *launch, *run_command(work, args, work / "run", "train.lr=1e-6", *words)]


def main() -> None:
    parser = parser_of(__doc__, "whole_run")
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=240.0)
    args = parser.parse_args()
    work = args.work.resolve()
    if args.small:
        args.shape, args.prompts, args.tokens, args.iterations = "small", 4, 16, 6
    make_model(work, args.shape, small=args.small)
    env = environment(NCCL_NVLS_ENABLE="0")
    with (work / "log.txt").open("w") as log:
        process = subprocess.Popen(command(work, args), env=env, stdout=log, stderr=subprocess.STDOUT, cwd=work)
        try:
            process.wait(args.timeout)
        except subprocess.TimeoutExpired:  # what was complete counts
            process.terminate()
            process.wait(60)
    first, *others = records_of(work / "run")
    records = others[WARMUP - 1 : -1]
    measured = {name: statistics.median(one[name] for one in records) for name in SHOWN if name in records[0]}
    measured |= {name: statistics.fmean(one[name] for one in records) for name in ("time/iteration_s",)}
    longer = max(measured["time/sampling_s"], measured["time/train_s"])
    measured |= {
        "tokens_per_s": measured["num_completion_tokens"] / measured["time/iteration_s"],
        "iteration_over_longer_of_its_own": measured["time/iteration_s"] / longer,
    }
    write_result(
        args.out,
        claim="An iteration that samples ahead takes at most 1.1 times the longer of sampling and training.",
        targets=[Target("iteration_over_longer_of_its_own", "<=", 1.1)],
        settings=args,
        measured=measured,
        details={"alone": first, "iterations": records},  # the first one has nothing beside it
    )


if __name__ == "__main__":
    main()
