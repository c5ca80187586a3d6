"""Runs with LoRA that train at once beside one server, on one GPU, against one after the other.

    python benchmarks/shared_server.py WORK --shape 1.7b            # alone, 4 and 8 at once: minutes an arm
    python benchmarks/shared_server.py WORK --shape 8b --arms base_8    # one arm; results have those of before too
    python benchmarks/shared_server.py WORK --small --arms alone 2    # a tiny model on the CPU

Random weights in bf16, adapters of rank 16 on all linear layers, 16 problems x 8 completions x 256 tokens an iteration,
one update, every block recomputed. Each arm is a sweep with `hydra/launcher=shared_server`.

    alone     one run: runs one after the other are as fast as this one, and each still has to start
    N         N runs at once
    base_N    the same, with the server's base as that of all trainers (weight_sync.share_base)

Iterations per hour are 3600 over the median seconds of an iteration, summed over the runs, without the first iterations
and those after the first run has ended. `gib` is the most that nvidia-smi shows for the whole card, less what others
used before; without a GPU, the memory of all processes, what they share counted once. `sweep_s` has all starts in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from common import environment, make_model, parser_of, print_ends, records_of, run_command, write_result
from small_card import used_gib

WARMUP = 2
SHOWN = (
    "time/iteration_s",
    "time/generate_s",
    "time/train_s",
    "time/sync_s",
    "perf/gpu_memory_gb",
    "alignment/diff_abs_mean",
)


def command(work: Path, args: argparse.Namespace, arm: str) -> list[str]:
    """Of the sweep."""
    num_runs = 1 if arm == "alone" else int(arm.removeprefix("base_"))
    words = ["--multirun", "hydra/launcher=shared_server", f"hydra.launcher.n_jobs={num_runs}"]
    words += [f"seed={','.join(map(str, range(num_runs)))}", f"hydra.sweep.dir={work / arm}"]
    words += ["generation=vllm_server", "weight_sync=lora_hotswap", "model/lora=default", "train.lr=1e-5"]
    words += [f"train.tokens_per_microbatch={args.microbatch}", "train.gradient_checkpointing=true"]  # others need room
    words += ["engine.args.max_model_len=1024", f"+engine.args.kv_cache_memory_bytes={int(args.kv_gib * 2**30)}"]
    words += ["weight_sync.share_base=true"] if arm.startswith("base_") else []
    if args.small:
        words += ["model.device=cpu", "train.precision=fp32", "engine.args.enforce_eager=true"]
        words += ["engine.args.gpu_memory_utilization=null", "+engine.args.max_num_batched_tokens=32768"]
    else:
        words += ["train.precision=bf16", "placement.check_memory=false", "engine.args.gpu_memory_utilization=0.5"]
    return [sys.executable, *run_command(work, args, work / arm, *words)]


def host_gib(process: psutil.Process) -> float:
    """Of a process and those that it has started, what they share counted once."""
    found = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            found += each.memory_full_info().pss
    return found / 2**30


def run(work: Path, args: argparse.Namespace, arm: str) -> int:
    """Returns the exit code; WORK/ARM.json gets the time and the peak."""
    before, peak, started = used_gib(args.card), 0.0, time.perf_counter()
    with (work / f"{arm}.log").open("w") as log:
        sweep = subprocess.Popen(command(work, args, arm), env=environment(), stdout=log, stderr=subprocess.STDOUT)
        watched, is_late = psutil.Process(sweep.pid), threading.Timer(args.timeout, sweep.terminate)
        is_late.start()
        try:
            while sweep.poll() is None:
                with suppress(psutil.Error):
                    peak = max(peak, used_gib(args.card) - before if args.card else host_gib(watched))
                time.sleep(0.2)
        finally:
            is_late.cancel()
            sweep.terminate()
    measured = {"sweep_s": time.perf_counter() - started, "gib": peak}
    (work / f"{arm}.json").write_text(json.dumps(measured))
    return sweep.returncode


def result_of(work: Path, arm: str) -> dict[str, Any]:
    """What the metrics of the runs say, while all of them trained; nothing where that was too short."""
    runs = [records_of(folder.parent) for folder in sorted((work / arm).glob("*/metrics"))]
    if min(map(len, runs), default=0) <= WARMUP:
        return {}
    together = [records[WARMUP : min(map(len, runs))] for records in runs]
    shown = [name for name in SHOWN if name in together[0][0]]
    median = {name: [statistics.median(r[name] for r in records) for records in together] for name in shown}
    found = {name.rpartition("/")[2]: statistics.fmean(median[name]) for name in shown}
    found["iterations_per_hour"] = sum(3600 / seconds for seconds in median["time/iteration_s"])
    found["num_runs"] = len(runs)
    return found | json.loads((work / f"{arm}.json").read_text())


def main() -> None:
    import torch

    parser = parser_of(__doc__, "shared_server")
    parser.add_argument("--arms", nargs="+", default=["alone", "4", "8", "base_4", "base_8"])
    parser.add_argument("--shape", default="1.7b")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--microbatch", type=int, default=4096, help="tokens")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="of the server's KV cache")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds of an arm")
    args = parser.parse_args()
    if args.small:
        args.shape, args.prompts, args.tokens, args.iterations, args.kv_gib = "small", 2, 8, 5, 0.0625
    args.card = f"GPU-{torch.cuda.get_device_properties(0).uuid}" if torch.cuda.is_available() else ""
    work = args.work.resolve()
    make_model(work, args.shape, small=args.small)
    failed = [arm for arm in args.arms if run(work, args, arm) != 0]
    print_ends(work, failed)

    found = {
        arm: result for arm in (path.stem for path in sorted(work.glob("*.json"))) if (result := result_of(work, arm))
    }
    measured = {f"{arm}_{name}": value for arm, result in found.items() for name, value in result.items()}
    for arm in found.keys() - {"alone"} if "alone" in found else ():
        times = found[arm]["iterations_per_hour"] / found["alone"]["iterations_per_hour"]
        measured[f"{arm}_over_one_after_the_other"] = times
    claim = "Runs that share a server make more iterations per hour at once than one after the other"
    write_result(args.out, claim=claim, targets=[], settings=args, measured=measured, details={"failed": failed})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
