"""What a mixture of experts gains from following vLLM's routes (`model.router_replay=rollout`), and what that costs:
how far trainer and engine are apart, in how many of the routers' decisions, and tokens per second, with and without.

    python benchmarks/router_replay.py WORK                                          # one GPU
    python benchmarks/router_replay.py WORK --shape 30b_a3b --dense 4b --trainers 2 --servers 2 \\
        --weight-sync lora_hotswap --timeout 1500 model/lora=default \\
        'model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]'                    # four GPUs
    python benchmarks/router_replay.py WORK --small                                  # on the CPU: `old`, in process

Random weights in bf16, whose routers are torn between experts more often than trained ones: an upper bound. The arm
"dense" is a model without experts, of about the active size. With one update an iteration, `routes/differ_frac` of the
arm "replay" says in how many decisions engine and trainer differ under equal weights. Results are medians over the
iterations after the first two.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import Target, environment, make_model, parser_of, print_ends, records_of, run_command, write_result

WARMUP = 2
ARMS = {"none": "none", "replay": "rollout", "dense": "none"}
SHOWN = ("alignment/diff_abs_mean", "alignment/diff_max", "mismatch/kl_k3", "mismatch/ess_frac", "routes/differ_frac")
SHOWN += ("time/generate_s", "time/train_s", "time/sync_s", "time/iteration_s", "sync/probe_diff_abs_mean")
SHOWN += ("perf/generate_tokens_per_s", "perf/train_tokens_per_s", "perf/tokens_per_s", "perf/gpu_memory_gb")


def command(work: Path, args: argparse.Namespace, arm: str) -> list[str]:
    """Of one arm's run; the model of "dense" is beside that of the others."""
    replay = "old" if args.small and arm == "replay" else ARMS[arm]
    words = ["train.lr=1e-6", f"model.router_replay={replay}", f"train.updates_per_iteration={args.updates}"]
    launch: list[str] = []
    if args.small:
        words += ["train.precision=fp32", "train.tokens_per_microbatch=2048", "model.device=cpu"]
    else:
        words += ["generation=vllm_server", f"weight_sync={args.weight_sync}", "train.precision=bf16"]
        words += [f"train.tokens_per_microbatch={args.microbatch}", f"engine.args.max_model_len={args.tokens + 512}"]
    if args.trainers > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.trainers)]
        words += ["train.sharding=fsdp2"]
    if args.servers:
        words += [f"placement.num_engines={args.servers}", "engine.args.gpu_memory_utilization=0.85"]
        words += [f"placement.engine_devices={[*range(args.trainers, args.trainers + args.servers)]}"]
    model = work / "dense" if arm == "dense" else work
    return [sys.executable, *launch, *run_command(model, args, work / "runs" / arm, *words)]


def measure(work: Path, args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Of an arm, which is run unless it has been."""
    if not (work / "runs" / arm).exists():
        with (work / f"{arm}.log").open("w") as log:
            process = subprocess.Popen(
                command(work, args, arm), env=environment(NCCL_NVLS_ENABLE="0"), stdout=log, stderr=subprocess.STDOUT
            )
            try:
                process.wait(args.timeout)
            except subprocess.TimeoutExpired:  # what was complete counts
                process.terminate()
                process.wait(60)
    records = records_of(work / "runs" / arm)[WARMUP:]
    if not records:
        print_ends(work, [arm])
        sys.exit(1)
    return {name: statistics.median(one[name] for one in records) for name in SHOWN if name in records[0]}


def main() -> None:
    parser = parser_of(__doc__, "router_replay")
    parser.add_argument("--shape", default="3b_a0.6b")
    parser.add_argument("--dense", default="0.6b", help="its shape; of 30b_a3b 4b")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=0, help="0: one, on the trainer's GPU")
    parser.add_argument("--weight-sync", default="reload")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds of an arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="to run; the result is of all")
    args = parser.parse_args()
    work = args.work.resolve()
    if args.small:
        args.shape, args.dense, args.prompts, args.tokens, args.iterations = "small_moe", "small", 4, 16, 4
        args.updates = 2
    for folder, shape in ((work, args.shape), (work / "dense", args.dense)):
        make_model(folder, shape, small=args.small)
    found = {arm: measure(work, args, arm) for arm in args.arms}
    if len(found) < len(ARMS):
        return
    measured = {f"{arm}/{name}": value for arm, own in found.items() for name, value in own.items()}
    for name in ("alignment/diff_abs_mean", "perf/generate_tokens_per_s", "perf/train_tokens_per_s"):
        measured[f"replay_over_none/{name}"] = found["replay"][name] / found["none"][name]
    measured["replay_over_dense/diff_abs_mean"] = (
        found["replay"]["alignment/diff_abs_mean"] / found["dense"]["alignment/diff_abs_mean"]
    )
    write_result(
        args.out,
        claim="With vLLM's routes trainer and engine are as close as with a dense model, at little cost.",
        targets=[
            Target("replay_over_dense/diff_abs_mean", "<=", 1.5),
            Target("replay_over_none/perf/generate_tokens_per_s", ">=", 0.9),
            Target("replay_over_none/perf/train_tokens_per_s", ">=", 0.95),
        ],
        settings=args,
        measured=measured,
        details=found,
    )


if __name__ == "__main__":
    main()
