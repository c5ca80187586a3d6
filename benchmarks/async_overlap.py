"""Overlap of sampling and training: `mode=async` against `mode=sync`, the same work beside a real vLLM server.

    python3 benchmarks/async_overlap.py [--name async_overlap] [--iterations 12] [OVERRIDE ...]

Without overrides a tiny model is trained on the CPU, beside a server on the CPU; settings make both take about as long.
async_trl.py measures the same on two GPUs.

The first three iterations of each run do not count, and neither does the last, which has nothing to sample ahead. Times
are means over the others: iterations that sample ahead may be long and short in turn, of which a median shows only one
kind. The longer of sampling and training is that of `mode=sync`, where neither slows the other;
`iteration_over_longer_of_its_own` takes it from the run that samples ahead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Target, write_result

ROOT = Path(__file__).parents[1]
COMMON = (
    "generation=vllm_server",
    "eval.enabled=false",
    "checkpoint.enabled=false",
    "logger=[json]",
    "train.drop_zero_signal_groups=false",
)
ON_CPU = (
    *("weight_sync=reload", "num_threads=1", "model.device=cpu", "rollouts.max_staleness=1", "train.lr=1e-6"),
    *(
        "data.problems_per_iteration=32",
        "data.rollouts_per_problem=16",
        "generation.max_new_tokens=96",
        "model.tiny.warm_start_steps=0",
    ),
    *(
        "engine.args.enforce_eager=true",
        "engine.args.distributed_executor_backend=uni",
        "engine.args.gpu_memory_utilization=null",
    ),
    *(
        "+engine.args.kv_cache_memory_bytes=67108864",
        "+engine.args.max_num_batched_tokens=32768",
        "+engine.env.OMP_NUM_THREADS=1",
    ),
    '+engine.env.VLLM_ENABLE_V1_MULTIPROCESSING="0"',
)
WARMUP = 3


def measure(mode: str, iterations: int, overrides: list[str]) -> dict[str, list[float]]:
    """See `rounds_of`."""
    kept = [override for override in overrides if mode == "async" or not override.startswith("rollouts.")]
    with tempfile.TemporaryDirectory() as folder:
        words = [*COMMON, *kept, f"mode={mode}", f"train.iterations={iterations}", f"hydra.run.dir={folder}"]
        subprocess.run([sys.executable, str(ROOT / "run_grpo.py"), *words], check=True, cwd=ROOT)
        return rounds_of(Path(folder))


def rounds_of(folder: Path) -> dict[str, list[float]]:
    """Every iteration's value of each number in a run's metrics, without the first ones and the last."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "metrics").glob("train_iter_*.json"))]
    found = found[WARMUP:-1]
    names = [name for name in found[0] if name.startswith(("time/", "async/", "mismatch/ess", "num_completion_tokens"))]
    return {name: [values[name] for values in found if name in values] for name in names}


def overlap(sync_rounds: dict[str, list[float]], async_rounds: dict[str, list[float]]) -> dict[str, float]:
    """What the two modes' values of each iteration say of the claim."""
    sync, ahead = (
        {name: statistics.fmean(values) for name, values in found.items()} for found in (sync_rounds, async_rounds)
    )
    longer = max(sync["time/generate_s"], sync["time/train_s"])
    own = max(ahead["time/sampling_s"], ahead["time/train_s"])
    return {
        "iteration_over_longer": ahead["time/iteration_s"] / longer,
        "iteration_over_longer_of_its_own": ahead["time/iteration_s"] / own,
        "speedup": sync["time/iteration_s"] / ahead["time/iteration_s"],
        "sync_generate_s": sync["time/generate_s"],
        "sync_train_s": sync["time/train_s"],
        "sync_push_s": sync["time/sync_s"],
        "async_sampling_s": ahead["time/sampling_s"],
        "async_train_s": ahead["time/train_s"],
        "async_iteration_s": ahead["time/iteration_s"],
        "async_age_mean": ahead["async/age_mean"],
        "async_ess_frac": ahead["mismatch/ess_frac"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="async_overlap")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    overrides = arguments.overrides or list(ON_CPU)
    rounds = {mode: measure(mode, arguments.iterations, overrides) for mode in ("sync", "async")}
    write_result(
        arguments.name,
        claim="An iteration that samples ahead takes at most 1.1 times the longer of sampling and training.",
        targets=[Target("iteration_over_longer", "<=", 1.1)],
        settings={"overrides": overrides, "iterations": arguments.iterations},
        measured=overlap(rounds["sync"], rounds["async"]),
        details=rounds,
    )


if __name__ == "__main__":
    main()
