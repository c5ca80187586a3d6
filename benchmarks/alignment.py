"""Twenty iterations of the default job with weight_sync=shared_vllm on a GPU: does the server serve the trained
weights, and does the policy learn?

    python benchmarks/alignment.py

Runs `run_grpo.py` like any user, in bf16 with CUDA graphs, and reads its metrics.
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


def main() -> None:
    arguments = parse()
    overrides = [
        "generation=vllm_server",
        f"weight_sync={arguments.weight_sync}",
        f"train.iterations={arguments.iterations}",
        f"train.precision={arguments.precision}",
        *arguments.overrides,
    ]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(ROOT / "run_grpo.py"), f"hydra.run.dir={folder}/run", *overrides], check=True, cwd=ROOT
        )
        read = [
            json.loads(path.read_text()) for path in sorted(Path(folder, "run", "metrics").glob("train_iter_*.json"))
        ]
        evaluations = [
            json.loads(path.read_text()) for path in sorted(Path(folder, "run", "metrics").glob("eval_i*.json"))
        ]
    assert len(read) == arguments.iterations
    rewards = [metrics["reward_mean"] for metrics in read]
    apart = [metrics["alignment/diff_abs_mean"] for metrics in read]
    probes = [metrics["sync/probe_diff_abs_mean"] for metrics in read]
    write_result(
        f"alignment_{arguments.weight_sync}",
        claim=f"weight_sync={arguments.weight_sync}: trainer and server agree at every iteration, and the reward rises",
        targets=[Target("alignment_worst_nats", "<=", 0.05), Target("reward_gain", ">=", 0.05)],
        settings={"overrides": overrides},
        measured={
            "alignment_worst_nats": max(apart),
            "alignment_median_nats": statistics.median(apart),
            "probe_worst_nats": max(probes),
            "reward_first_three": statistics.fmean(rewards[:3]),
            "reward_last_three": statistics.fmean(rewards[-3:]),
            "reward_gain": statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:3]),
            "pass@1_before": evaluations[0]["pass@1"],
            "pass@1_after": evaluations[-1]["pass@1"],
            "sync_push_s": statistics.median(metrics["time/sync_push_s"] for metrics in read),
            "sync_paused_s": statistics.median(metrics["time/sync_paused_s"] for metrics in read),
            "iteration_s": statistics.median(metrics["time/iteration_s"] for metrics in read),
        },
        details={"reward_mean": rewards, "alignment/diff_abs_mean": apart, "sync/probe_diff_abs_mean": probes},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="further overrides of run_grpo.py")
    parser.add_argument("--weight-sync", default="shared_vllm")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--precision", default="bf16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
