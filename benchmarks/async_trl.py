"""Training and sampling at once on two cards: `mode=async` against TRL's AsyncGRPOTrainer and `mode=sync`.

    python benchmarks/async_trl.py WORK --gpus 0 1                              # one arm after the other
    python benchmarks/async_trl.py WORK --gpus 0 1 2 3 --shape 1.7b --batch 16  # two at the same time
    python benchmarks/async_trl.py WORK --small                                 # a tiny model on the CPU

32 prompts x 8 completions x 512 tokens an update, all weights, bf16, the same random model, prompts, reward, loss,
learning rate and sequences in a microbatch; one card trains, the other serves, NCCL carries the weights. Numbers of
tokens and prompt ids are compared before times: means over the wall clock, without the first updates, and without our
last one, which has nothing to sample ahead. The longer of sampling and training is that of `mode=sync`, where neither
slows the other; `iteration_over_longer_of_its_own` takes it from the run that samples ahead. Logs are in WORK.

    ours    mode=async with rollouts.max_staleness=--staleness; fp32 masters
    sync    mode=sync, else the same: what sampling and training take alone
    trl     bf16 weights and optimizer, no recomputation, rows packed to the tokens of --batch sequences, with shared
            prefixes; vLLM's server with its defaults, and as much in flight there as in ours. max_staleness is 2 more,
            because the data loader waits for samples of the next update before it hands out the last ones of this: with
            less, TRL throws many away. On the CPU its weights stay where they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from common import Target, environment, make_model, parser_of, print_ends, records_of, write_result
from iteration_gpu import GROUP, PROMPTS, TOKENS, check_same_work, our_command
from pyarrow.parquet import read_table

from offline_grpo.engine.http import choose_port

ARMS = ("ours", "sync", "trl")
SHOWN = ("perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/weight_sync_s", "sample/staleness_mean", "ratio")

WARMUP = 3

started: list[list[subprocess.Popen[Any]]] = []


def rounds_of(folder: Path) -> dict[str, list[float]]:
    """Every iteration's value of each number in a run's metrics, without the first ones and the last."""
    found = records_of(folder)[WARMUP:-1]
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


def our_words(args: argparse.Namespace, arm: str) -> tuple[str, ...]:
    ahead = ("mode=async", f"rollouts.max_staleness={args.staleness}") if arm == "ours" else ("mode=sync",)
    loss = ("train/loss=dapo", "train.loss.clip_high=0.2", "train.loss.ratio_reference=rollout")  # TRL's
    words = (*ahead, *loss, "train.loss.importance_correction=none", "task.eval_split=train")  # holds nothing out
    cards = ("weight_sync=nccl", "model.device=cuda:0", "placement.engine_devices=[1]")
    cards += (f"train.tokens_per_microbatch={args.batch * (args.tokens + 32)}",)
    return (*words, "weight_sync=reload") if args.small else (*words, *cards)


def server_command(work: Path, args: argparse.Namespace, port: int) -> list[str]:
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", f"{work}/model"]
    words += ["--port", str(port), "--host", "127.0.0.1", "--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", '{"backend":"nccl"}', "--gpu-memory-utilization", args.share]
    return [*words, "--max-model-len", *(["256", "--enforce-eager"] if args.small else ["1024"])]


def our_result(folder: Path) -> dict[str, Any]:
    """What a run's metrics say; the seconds lie between the times at which their files were written."""
    written = [path.stat().st_mtime for path in sorted((folder / "metrics").glob("train_iter_*.json"))]
    rounds = rounds_of(folder)
    seconds = [b - a for a, b in pairwise(written)][WARMUP - 1 : -1]
    prompts = read_table(folder / "rollouts" / "iter_000.parquet")["prompt_ids"].to_pylist()[::GROUP]
    return {"seconds": seconds, "tokens": rounds["num_completion_tokens"], "rounds": rounds, "prompts": prompts}


def end(process: subprocess.Popen[Any]) -> None:
    """A process and all that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, how)
            process.wait(30)


def stop(*_: Any) -> None:
    for process in chain(*started):
        end(process)
    os._exit(1)


def run_arm(work: Path, args: argparse.Namespace, arm: str, cards: list[str]) -> bool:
    """Whether it came to its end. The last of its processes trains; one that ends before it has failed."""
    env = environment(**({"OMP_NUM_THREADS": "1"} if args.small else {}))
    if arm == "trl":
        env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        port = choose_port("127.0.0.1", None, key="port")
        settings = {**vars(args), "work": str(work), "url": f"http://127.0.0.1:{port}"}
        inside = [sys.executable, str(Path(__file__).with_name("async_trl_arm.py")), json.dumps(settings)]
        commands = {"trl_server": (server_command(work, args, port), cards[1:]), arm: (inside, cards[:1])}
    else:
        commands = {arm: (our_command(work, args, arm, our_words(args, arm)), cards)}
    processes: list[subprocess.Popen[Any]] = []
    started.append(processes)
    with contextlib.ExitStack() as stack:
        for name, (words, seen) in commands.items():
            log = stack.enter_context((work / f"{name}.log").open("w"))
            how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True, "cwd": work}
            how["env"] = env | ({"CUDA_VISIBLE_DEVICES": ",".join(seen)} if seen else {})
            processes.append(subprocess.Popen(words, **how))
            stack.callback(end, processes[-1])
        deadline = time.monotonic() + args.timeout
        while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.5)
        return processes[-1].poll() == 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "async_trl", "--name")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--gpus", nargs="+", default=["0", "1"], help="two for each arm that runs at the same time")
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a microbatch")
    parser.add_argument("--share", default="0.85", help="of the second card's memory, for vLLM")
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds of an arm")
    args = parser.parse_args()
    args.prompts, args.tokens = (4, 16) if args.small else (PROMPTS, TOKENS)
    if args.small:
        args.batch, args.share, args.gpus = 8, "0.1", []
    return args


def main() -> None:
    args = parse()
    work = args.work.resolve()
    make_model(work, args.shape, small=args.small)
    signal.signal(signal.SIGTERM, stop)  # of `timeout`
    pairs = [args.gpus[i : i + 2] for i in range(0, len(args.gpus), 2)] or [[]]
    run, failed = partial(run_arm, work, args), []
    with ThreadPoolExecutor(len(pairs)) as pool:
        for arms in (args.arms[i : i + len(pairs)] for i in range(0, len(args.arms), len(pairs))):
            failed += [arm for arm, ended in zip(arms, pool.map(run, arms, pairs), strict=True) if not ended]
    print_ends(work, failed)
    found = {arm: our_result(work / arm) for arm in ("ours", "sync") if len(records_of(work / arm)) > WARMUP + 1}
    if (work / "trl.json").exists():  # also of an arm that was run before
        found["trl"] = json.loads((work / "trl.json").read_text())
    measured = {f"{arm}_s": statistics.fmean(result["seconds"]) for arm, result in found.items()}
    measured |= {f"{arm}_tokens_per_s": statistics.fmean(found[arm]["tokens"]) / measured[f"{arm}_s"] for arm in found}
    targets = []
    if {"ours", "sync"} <= found.keys():
        measured |= overlap(found["sync"]["rounds"], found["ours"]["rounds"])
        targets.append(Target("iteration_over_longer", "<=", 1.1))
    if "trl" in found:
        check_same_work(work, found, tolerance=0.5 if args.small else 0.02)  # with a vocabulary of 100, some end
        assert all(result["prompts"] == found["trl"]["prompts"] for result in found.values()), "prompts differ"
        measured |= {f"trl_{name.split('/')[-1]}": statistics.fmean(found["trl"]["rounds"][name]) for name in SHOWN}
    if {"ours", "trl"} <= found.keys():
        measured["ours_vs_trl"] = measured["ours_s"] / measured["trl_s"]
        targets.append(Target("ours_vs_trl", "<=", 1.0))
    write_result(
        args.name,
        claim="Sampling and training at once on two cards: an update takes at most as long as TRL's AsyncGRPO takes, "
        "and at most 1.1 times the longer of the two alone",
        targets=targets,
        settings=args,
        measured=measured,
        details={arm: {k: v for k, v in result.items() if k != "prompts"} for arm, result in found.items()},
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
