"""Whether two checkouts compute the same: metrics of whole runs on the CPU, bit for bit, apart from times.

    python tests/same_numbers.py record FOLDER [SCENARIO ...] --root OTHER_CHECKOUT
    python tests/same_numbers.py compare FOLDER [SCENARIO ...]

`record` runs the scenarios with the checkout at --root (by default this one, and its .venv) and keeps their metrics in
FOLDER; `compare` runs them again and exits with 1 where a number differs. Numbers are of one machine: record on the one
that compares. The groups that Atropos serves and the store that is replayed are kept in FOLDER, so that both checkouts
get the same ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("fakes")))
from scripted_server import Reply, Request, ScriptedServer
from worlds import write_sums

VARYING = ("time/", "perf/")
GONE = {"sync/num_foreign_writes", "measured/dropped_tokens"}
"""Metrics that a later version no longer writes."""
SHORT = ("train.iterations=12", "eval.interval=6", "eval.num_ids=32", "checkpoint.enabled=false")
SERVER = (
    "generation=vllm_server",
    "weight_sync=reload",
    "engine.args.enforce_eager=true",
    "engine.args.distributed_executor_backend=uni",
    "+engine.args.kv_cache_memory_bytes=67108864",
    "engine.args.gpu_memory_utilization=null",
    "+engine.env.OMP_NUM_THREADS=1",
    '+engine.env.VLLM_ENABLE_V1_MULTIPROCESSING="0"',
    "model.device=cpu",
)
NUM_ATROPOS = 8
"""Iterations that are trained on groups of Atropos, and replayed."""

SCENARIOS: dict[str, tuple[int, tuple[str, ...]]] = {
    "default": (1, ("train.iterations=30", "checkpoint.enabled=false")),
    "lora": (1, (*SHORT, "model/lora=default", "train.lr=1e-3")),
    "dr_grpo": (1, (*SHORT, "train/loss=dr_grpo", "train.updates_per_iteration=2")),
    "gspo_kl": (1, (*SHORT, "train/loss=gspo", "train.kl_coef=0.05", "train.epochs=2")),
    "dapo": (1, (*SHORT, "experiment=dapo")),
    "two_processes": (2, SHORT),
    "fsdp2": (2, (*SHORT, "train.sharding=fsdp2", "train.updates_per_iteration=2")),
    "reload": (1, ("train.iterations=5", "eval.interval=5", "eval.num_ids=16", *SERVER)),
    "atropos": (
        1,
        (
            "rollouts=atropos",
            "rollouts.url=@api",
            "rollouts.start_api=false",
            f"train.iterations={NUM_ATROPOS}",
            "eval.enabled=false",
            "checkpoint.enabled=false",
        ),
    ),
    "replay": (1, (*SHORT, f"train.iterations={NUM_ATROPOS}", "rollouts=replay", "rollouts.path=@store")),
    "environment": (
        1,
        (
            *(*SHORT, "task=environment", "task.environment=worlds:PaidSums", "task.path=@sums", "scoring.workers=0"),
            *("train/advantage=per_turn", "task.max_environment_tokens=40", "task.max_turn_tokens=6", "num_threads=1"),
            *("generation.max_new_tokens=18", "eval.max_new_tokens=18", "model.tiny.warm_start_steps=120"),
        ),
    ),
    "distill": (
        1,
        (*SHORT, "train/advantage=distill", "train.advantage.teacher=@teacher", "train.kl_coef=0", "seed=1"),
    ),
    "curriculum": (1, (*SHORT, "data.pass_rate=[0.1,0.9]", "data.num_train_seeds=64")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("scenarios", nargs="*", default=[], help=f"of {', '.join(SCENARIOS)}; all by default")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout that runs")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    store = args.folder.resolve() / "store"
    if not store.exists():  # of a run whose last checkpoint is a teacher too
        run(args.root, "default", store, args.folder, "checkpoint.enabled=true")
        write_sums(args.folder.resolve() / "sums.jsonl", 600, 20)
    is_same = True
    for name in args.scenarios or SCENARIOS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            found = run(args.root, name, Path(scratch) / "run", args.folder)
        kept = args.folder / f"{name}.json"
        if args.action == "record":
            kept.write_text(json.dumps(found, indent=1, sort_keys=True))
            problems = []
        else:
            problems = differences(json.loads(kept.read_text()), found)
        is_same &= not problems
        state = "recorded" if args.action == "record" else "differs" if problems else "the same"
        print(f"{name:14} {state:9} {len(found)} files, {time.monotonic() - began:.0f} s", flush=True)
        for problem in problems[:10]:
            print(f"    {problem}")
    sys.exit(0 if is_same else 1)


def run(root: Path, name: str, folder: Path, shared: Path, *more: str) -> dict[str, dict[str, Any]]:
    """The metrics files of a scenario that runs in `folder`, without what varies."""
    num_processes, overrides = SCENARIOS[name]
    store = shared.resolve() / "store"
    with ScriptedServer(atropos(store / "rollouts")) as api:
        kept = {"@api": api.base_url, "@store": store, "@teacher": teacher_of(store)}
        kept |= {"@sums": store.with_name("sums.jsonl")}
        words = [next((word.replace(at, str(it)) for at, it in kept.items() if at in word), word) for word in overrides]
        python = root.resolve() / ".venv" / "bin" / "python"
        command = [str(python)]
        if num_processes > 1:
            command = [str(python.with_name("accelerate")), "launch", "--cpu", "--num_processes", str(num_processes)]
        command += [str(root.resolve() / "run_grpo.py"), *words, *more, f"hydra.run.dir={folder}"]
        command += [f"cache_dir={shared.resolve() / 'cache'}"]
        env = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        env["PYTHONPATH"] = str(Path(__file__).parent / "fakes")  # of the environments, the same for both checkouts
        done = subprocess.run(command, cwd=shared, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        sys.exit(f"{name}: ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    files = sorted((folder / "metrics").glob("*_iter_*.json"))
    return {file.name: stable(json.loads(file.read_text())) for file in files}


def teacher_of(store: Path) -> Path | None:
    return max((store / "checkpoints").glob("iter_*"), default=None)


def stable(metrics: dict[str, Any]) -> dict[str, Any]:
    kept = (key for key in metrics if not key.startswith(VARYING))
    return {key: metrics[key] for key in kept if key not in GONE}


def differences(kept: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    problems = [f"{name}: only in one of them" for name in sorted(kept.keys() ^ found.keys())]
    for name in sorted(kept.keys() & found.keys()):
        before, after = stable(kept[name]), found[name]
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after:
                problems.append(f"{name}: {key}: only {'after' if key in after else 'before'}")
            elif before[key] != after[key] and not (before[key] != before[key] and after[key] != after[key]):
                problems.append(f"{name}: {key}: {before[key]!r} is now {after[key]!r}")
    return problems


def atropos(rollouts: Path) -> Callable[[Request], Reply]:
    """The script of an Atropos API that serves the recorded groups of a store, an iteration a batch."""
    owner: dict[str, Any] = {}
    batches: list[list[dict[str, Any]]] = []

    def answer(request: Request) -> Reply:
        match request.path:
            case "/reset_data":
                owner.clear()
            case "/register":
                owner.update(request.body)
                batches[:] = recorded_batches(rollouts)
            case "/batch":
                return Reply({"batch": batches.pop(0) if batches else None})
        sizes = {key: owner.get(key, -1) for key in ("batch_size", "max_token_len")}
        group = owner.get("wandb_group")
        return Reply({"uuid": 1, "group": group, "project": "", "current_step": 0, "queue_size": 0, **sizes})

    return answer


def recorded_batches(rollouts: Path) -> list[list[dict[str, Any]]]:
    import pyarrow.parquet as parquet

    batches = []
    for iteration in range(NUM_ATROPOS):
        groups: dict[int, dict[str, Any]] = {}
        for row in parquet.read_table(rollouts / f"iter_{iteration:03d}.parquet").to_pylist():
            if row["phase"] != "train":
                continue
            empty = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
            group = groups.setdefault(row["group"], {**empty, "generation_params": {"temperature": row["temperature"]}})
            prompt, completion = row["prompt_ids"], row["completion_ids"]
            group["tokens"].append(prompt + completion)
            group["masks"].append([-100] * len(prompt) + completion)
            group["scores"].append(row["reward"])
            group["inference_logprobs"].append([1.0] * len(prompt) + row["logprobs"])
        batches.append(list(groups.values()))
    return batches


if __name__ == "__main__":
    main()
