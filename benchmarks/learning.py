"""Learning curves of a real model: five losses and TRL's GRPOTrainer on three tasks, several seeds, many runs at the
same time.

    python benchmarks/learning.py WORK --model FOLDER --minutes 18      # all cards that are visible, 5 runs on each
    python benchmarks/learning.py WORK --collect                        # the result again, from what is in WORK
    python benchmarks/learning.py WORK --model FOLDER --small           # a few tiny runs on the CPU

FOLDER is a model in transformers' format; curves of SmolLM2-135M-Instruct are in the results. The problems are made by
reasoning-gym, unless WORK/data has them (`learning_tasks.py`). All runs have the same prompts, rewards, batch, schedule
and learning rate; those named after a loss differ in it alone, the others in what EXTRAS says. Each worker runs jobs
one after the other, seed by seed, on its share of a card and of the cores; its vLLM server serves all of our jobs,
because each run's first push replaces the weights. The result is written after every job: what is cut off loses only
what is in flight, and the same command later does the rest. Jobs run in the order of their worth: the first task with
three seeds, the extras terse and lr_1e-4, the other tasks with three seeds, then more seeds and the other extras. For
twelve minutes of seven H200 with 112 cores, 94 runs (one of five runs at a time takes 100 to 190 s):

    python benchmarks/learning.py WORK --model FOLDER --minutes 11.5 --least-s 110
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import learning_tasks
import numpy as np
from common import ROOT, Target, parser_of, write_result

from offline_grpo.engine.http import choose_port
from offline_grpo.eval.statistics import mean_interval, t_975
from offline_grpo.report.runs import load_run

LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
LR, UPDATES = 1e-5, 2
KV_BYTES = 2 << 30
EXTRAS: Mapping[str, tuple[str, Sequence[str]]] = {
    "terse": ("sums", ["train.lr=3e-5", "task.reward=learning_tasks:terse", "train.kl_coef=0.001"]),
    "lr_1e-4": ("sums", ["train.lr=1e-4", "train.kl_coef=0.001"]),
    "lora": ("sums", ["model/lora=default", "train.lr=1e-4"]),
    "nf4": ("sums", ["model/lora=default", "train.lr=1e-4", "model.quantization=nf4"]),
    "fp8": ("sums", []),
}
"""Arm -> its task, and what it changes of the arm grpo. The first two look for a collapse, and run early."""
IN_PROCESS = ("lora", "nf4")
"""Arms that sample without a server, whose base weights other arms replace. The second is compared with the first."""
SERVED: Mapping[str, Sequence[str]] = {"fp8": ["--quantization", "fp8"]}
"""Arm -> options of a server of its own."""
FEW_SEEDS = 3
"""That a task gets before the next task begins."""
SERIES = ("reward_mean", "success_rate", "entropy", "completion_tokens_mean", "kl_divergence", "clip_frac", "grad_norm")
SERIES += ("alignment/diff_abs_mean", "mismatch/kl_k3", "mismatch/ess_frac", "sync/probe_diff_abs_mean")
"""Of training, kept with each curve as means over ten iterations."""


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # this and the next one: of weight_sync=ipc
    "OFFLINE_GRPO_NEEDS_RAY": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    arm: str
    seed: int
    sync: str

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm}-{self.seed}"

    @property
    def is_ours(self) -> bool:
        return self.arm != "trl"


@dataclass
class Worker:
    """Runs jobs on one card, or share of a card; `cores` are its own (empty: any)."""

    args: argparse.Namespace
    card: str
    number: int
    cores: Sequence[int] = ()
    servers: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], str]] = field(default_factory=dict)
    """By their options."""

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        words = ["taskset", "-c", ",".join(map(str, self.cores)), *command] if self.cores else command
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": self.card, "PYTHONPATH": os.pathsep.join(paths)}
        # each of TRL's runs opens it, though it has a single process
        env["MASTER_PORT"] = str(choose_port("127.0.0.1", None, key="MASTER_PORT"))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            return subprocess.Popen(
                words, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
            )

    def serve(self, options: Sequence[str]) -> str:
        """The address of this worker's server with these options, which is started where it does not run."""
        server, url = self.servers.get(tuple(options), (None, ""))
        if server is not None and server.poll() is None:
            return url
        args, log = self.args, self.args.work / "servers" / f"{self.card}_{self.number}_{time.time():.0f}.log"
        command = [sys.executable, "-m", "offline_grpo.engine.serve", str(args.model), "--port", "null"]
        command += ["--log-dir", str(log.parent), "--max-model-len", "512", "--max-num-seqs", "256"]
        if args.small:
            command += ["--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.05"]
        else:
            command += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.05"]
            command += ["--kv-cache-memory-bytes", str(KV_BYTES), "--weight-transfer-config", '{"backend": "ipc"}']
        server = self.start([*command, *options], log)
        self.servers[tuple(options)] = server, ""
        while server.poll() is None and time.time() < args.deadline:
            if found := re.search(r"is served at (\S+)", log.read_text()):
                self.servers[tuple(options)] = server, found[1]
                return found[1]
            time.sleep(0.5)
        raise RuntimeError(f"no server: {log.read_text()[-2000:]}")

    def run(self, job: Job) -> int | None:
        """Its exit code; None if the time ran out."""
        folder = self.args.work / job.name
        folder.mkdir(parents=True)
        url = self.serve(SERVED.get(job.arm, ())) if job.is_ours and job.arm not in IN_PROCESS else ""
        command = our_command(job, self.args, folder, url) if job.is_ours else trl_command(job, self.args)
        started = time.time()
        process = self.start(command, folder / "log.txt")
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=max(1.0, self.args.deadline - time.time()))
        end(process)
        wall = {"rc": code, "wall_s": time.time() - started, "card": self.card, "worker": self.number}
        (folder / "job.json").write_text(json.dumps(wall))
        return code

    def stop(self) -> None:
        for server, _ in self.servers.values():
            server.terminate()  # it stops vLLM
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                end(server)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and of those that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def our_command(job: Job, args: argparse.Namespace, folder: Path, url: str) -> list[str]:
    on_gpu = ["train.precision=bf16", "train.batch_size=null", "train.tokens_per_microbatch=8192"]
    on_cpu = ["train.precision=fp32", "train.batch_size=8", "model.device=cpu"]
    loss = job.arm if job.arm in LOSSES else "grpo"
    served = f"generation=vllm_server generation.base_url={url} weight_sync={job.sync}"
    words = f"""
        model=hf task=dataset task.reward=learning_tasks:{learning_tasks.REWARDS[job.task]} scoring.workers=2
        {"" if job.arm in IN_PROCESS else served}
        generation.max_new_tokens={limit(job, args)} checkpoint.enabled=false eval.ks=[1]
        data.problems_per_iteration={args.prompts} data.rollouts_per_problem={args.group} seed={job.seed}
        train/loss={loss} train.updates_per_iteration={UPDATES} train.iterations={args.iterations}
        train.lr={LR} train.schedule=constant train.kl_coef=0 train.drop_zero_signal_groups=false
        eval.interval={args.eval_interval} eval.num_ids={args.eval_problems} eval.replicates={args.eval_samples}
    """
    return [
        *(sys.executable, str(ROOT / "run_grpo.py"), *words.split()),
        *(f"model.train_id={args.model}", f"task.path={args.work}/data/{job.task}", f"hydra.run.dir={folder}/run"),
        *(on_cpu if args.small else on_gpu),
        *EXTRAS.get(job.arm, ("", []))[1],
        *args.overrides,
    ]


def limit(job: Job, args: argparse.Namespace) -> int:
    """Tokens of the longest completion."""
    return args.tokens or learning_tasks.TOKENS[job.task]


def trl_command(job: Job, args: argparse.Namespace) -> list[str]:
    settings = {
        "model": str(args.model),
        "data": str(args.work / "data" / job.task),
        "reward": learning_tasks.REWARDS[job.task],
        "seed": job.seed,
        "lr": LR,
        "iterations": args.iterations,
        "updates": UPDATES,
        "prompts": args.prompts,
        "group": args.group,
        "tokens": limit(job, args),
        "eval_interval": args.eval_interval,
        "eval_problems": args.eval_problems,
        "eval_samples": args.eval_samples,
        "kv_bytes": KV_BYTES,
        "microbatch": 2 if args.small else 32,
        "on_cpu": args.small,
    }
    script = str(Path(__file__).with_name("learning_trl.py"))
    return [sys.executable, script, str(args.work / job.name), json.dumps(settings)]


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """In the order in which they run, because the time may end before the last: the first task with few seeds and the
    first extras, the other tasks with few seeds, then more seeds and the other extras.
    """
    sync, few, more = "reload" if args.small else "ipc", range(args.seeds)[:FEW_SEEDS], range(args.seeds)[FEW_SEEDS:]

    def all_arms(tasks: Sequence[str], seeds: Iterable[int]) -> list[Job]:
        return [Job(task, arm, seed, sync) for seed in seeds for task in tasks for arm in ("trl", *LOSSES)]

    chosen = [(arm, task) for arm, (task, _) in EXTRAS.items() if task in args.tasks]
    extras = [Job(task, arm, seed, sync) for seed in range(args.seeds // 2 or 1) for arm, task in chosen]
    first, *others = args.tasks
    planned = all_arms([first], few) + extras[:2] + all_arms(others, few) + all_arms(args.tasks, more) + extras[2:]
    return [job for job in planned if (not args.arms or job.arm in args.arms) and not is_done(args.work / job.name)]


def is_done(folder: Path) -> bool:
    """Whether a run of this name ended before: its curve is kept."""
    return (folder / "job.json").is_file() and json.loads((folder / "job.json").read_text())["rc"] == 0


class Queue:
    """Jobs, what became of them, and the result that is written after each."""

    def __init__(self, args: argparse.Namespace, jobs: Sequence[Job]) -> None:
        self.args, self.waiting, self.lock = args, deque(jobs), threading.Lock()

    def work(self, worker: Worker) -> None:
        """Until nothing waits, or too little time is left for another."""
        while time.time() < self.args.deadline - self.args.least_s:
            with self.lock:
                if not self.waiting:
                    return
                job = self.waiting.popleft()
                shutil.rmtree(self.args.work / job.name, ignore_errors=True)  # while nobody collects
            try:
                code = worker.run(job)
            except RuntimeError as error:  # no server
                print(f"{job.name}: {error}", flush=True)
                self.again(job)
                return
            print(f"{time.strftime('%T')} card {worker.card} worker {worker.number}: {job.name} {code}", flush=True)
            if code not in (0, None):
                log = (self.args.work / job.name / "log.txt").read_text(errors="replace")
                print(f"{job.name} failed:\n{log[-1500:]}", flush=True)
                if job.is_ours and job.sync == "ipc":  # once more, by the way that works everywhere
                    self.again(replace(job, sync="reload"))
            with self.lock:
                collect(self.args)

    def again(self, job: Job) -> None:
        with self.lock:
            self.waiting.appendleft(job)


def run_all(args: argparse.Namespace) -> None:
    cards, jobs = args.gpus or [""], jobs_of(args)
    # Each worker has its share of the cores, where it has two or more.
    cores, num_workers = sorted(os.sched_getaffinity(0)), len(cards) * args.workers
    share, workers = len(cores) // num_workers, list[Worker]()
    for n in range(num_workers):
        own = cores[n * share : (n + 1) * share] if share > 1 else []
        workers.append(Worker(args, cards[n // args.workers], n % args.workers, own))
    queue = Queue(args, jobs)
    threads = [threading.Thread(target=queue.work, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.stop()


# The result


def curve_of(folder: Path) -> dict[str, Any] | None:
    """Steps, held-out pass@1 there, seconds of training until then; and means of SERIES over ten iterations. None for
    a run without an evaluation.
    """
    if (path := folder / "curve.json").is_file():
        return json.loads(path.read_text())
    history = load_run(folder / "run")
    held_out, seconds = history.series("eval/pass@1"), history.series("train/time/iteration_s").values
    eval_s = [metrics.get("time/eval_s", 0.0) for metrics in history.train.values()]
    if not len(held_out):
        return None
    trained = np.concatenate([[0.0], np.cumsum(seconds - np.array(eval_s))])
    tens = {
        key: [float(values[i : i + 10].mean()) for i in range(0, len(values), 10)]
        for key in SERIES
        if len(values := history.series(f"train/{key}").values)
    }
    return {
        "steps": held_out.steps.tolist(),
        "pass@1": held_out.values.tolist(),
        "seconds": [float(trained[int(step)]) for step in held_out.steps],
        "start_s": history.start_seconds().get("", 0.0),
        "iteration_s": np.diff(trained).tolist(),
        "train": tens,
    }


def rounded(value: Any) -> Any:
    """Four significant digits, which keeps the file readable."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def apart(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Difference of the means and half of its 95% interval (Welch)."""
    parts = [float(np.var(each, ddof=1)) / len(each) for each in (a, b)]
    total = sum(parts)
    spreads = (part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
    freedom = total**2 / sum(spreads) if total else 1
    return float(np.mean(a) - np.mean(b)), t_975(max(1, math.floor(freedom))) * math.sqrt(total)


def seconds_to(level: float, curves: Sequence[Mapping[str, Any]]) -> float:
    """Seconds until the mean curve first reaches a level, on straight lines between evaluations; inf if it does not."""
    means, seconds = (np.mean([curve[key] for curve in curves], axis=0) for key in ("pass@1", "seconds"))
    for i in range(1, len(means)):
        if means[i] >= level > means[i - 1]:
            share = (level - means[i - 1]) / (means[i] - means[i - 1])
            return float(seconds[i - 1] + (seconds[i] - seconds[i - 1]) * share)
    return math.inf


def collect(args: argparse.Namespace) -> None:
    """Write the result of all that is in WORK."""
    runs: dict[str, dict[str, Any]] = {}
    for path in sorted(args.work.glob("*-*-*/job.json")):
        folder, job = path.parent, json.loads(path.read_text())
        task, _, rest = folder.name.partition("-")
        arm, _, seed = rest.rpartition("-")
        curve = curve_of(folder) or {}
        done = bool(curve) and curve["steps"][-1] == args.iterations
        runs[folder.name] = rounded({"task": task, "arm": arm, "seed": int(seed), "done": done, **job, **curve})
    measured: dict[str, Any] = {"num_runs": len(runs), "num_done": sum(run["done"] for run in runs.values())}
    targets: list[Target] = []
    for task in args.tasks:
        arms: dict[str, list[dict[str, Any]]] = {}
        for run in runs.values():
            if run["task"] == task and run["done"]:
                arms.setdefault(run["arm"], []).append(run)
        for arm, found in arms.items():
            finals = np.array([[run["pass@1"][-1]] for run in found])
            measured |= {f"{task}/{arm}/first": float(np.mean([run["pass@1"][0] for run in found]))}
            measured |= {f"{task}/{arm}/last": float(finals.mean()), f"{task}/{arm}/seeds": len(found)}
            if len(found) > 1:
                low, high = mean_interval(finals)
                measured |= {f"{task}/{arm}/low": float(low[0]), f"{task}/{arm}/high": float(high[0])}
            every = [s for run in found for s in run["iteration_s"][1:]]
            measured[f"{task}/{arm}/iteration_s"] = float(np.median(every))
        exact, rounded_base = (arms.get(arm, []) for arm in IN_PROCESS)
        if len(exact) > 1 and len(rounded_base) > 1:
            pair = [[run["pass@1"][-1] for run in found] for found in (rounded_base, exact)]
            difference, half = apart(*pair)
            measured |= {f"{task}/nf4_minus_lora": difference, f"{task}/nf4_minus_lora_half": half}
            measured[f"{task}/nf4_beyond_interval"] = max(0.0, abs(difference) - half)
            targets.append(Target(f"{task}/nf4_beyond_interval", "<=", 0.0))
        ours, theirs = arms.get("grpo", []), arms.get("trl", [])
        if len(ours) > 1 and len(theirs) > 1:
            pairs = [
                [[run["pass@1"][i] for run in runs] for runs in (ours, theirs)] for i in range(len(ours[0]["steps"]))
            ]
            found = [apart(*pair) for pair in pairs]
            difference, half = found[-1]
            measured |= {f"{task}/minus_trl": difference, f"{task}/minus_trl_half": half}
            inside = sum(abs(d) <= h for d, h in found[1:]) / (len(found) - 1)
            measured[f"{task}/evaluations_within_frac"] = inside
            targets.append(Target(f"{task}/evaluations_within_frac", ">=", 0.8))
            level = min(np.mean(pair_arm) for pair_arm in pairs[-1])
            times = seconds_to(float(level), ours), seconds_to(float(level), theirs)
            measured |= {f"{task}/level": float(level), f"{task}/ours_to_level_s": times[0]}
            measured[f"{task}/trl_to_level_s"] = times[1]
    write_result(
        args.out,
        claim="A small real model learns with five losses, and with grpo as with TRL, within the intervals over seeds",
        targets=targets,
        settings={key: str(vars(args)[key]) for key in sorted(vars(args).keys() - {"work", "model", "deadline"})},
        measured=rounded({key: value for key, value in measured.items() if value != math.inf}),
        details=runs,
    )


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "learning")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--gpus", nargs="+", default=None, help="cards (default: all that are visible)")
    parser.add_argument("--workers", type=int, default=5, help="runs at the same time on each card")
    parser.add_argument("--tasks", nargs="+", default=list(learning_tasks.TOKENS), choices=list(learning_tasks.TOKENS))
    parser.add_argument("--arms", nargs="+", default=None)
    sizes = {"seeds": 5, "iterations": 60, "prompts": 32, "group": 8}
    for name, default in {**sizes, "eval-interval": 10, "eval-problems": 256, "eval-samples": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=None, help="longest completion (default: the task's)")
    parser.add_argument("--least-s", type=float, default=60.0, help="no job begins with less time left")
    parser.add_argument("--collect", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.iterations, args.prompts, args.group, args.tokens = 2, 4, 2, 8
        args.eval_interval, args.eval_problems, args.eval_samples = 1, 4, 1
    args.work = args.work.resolve()
    return args


def main() -> None:
    args = parse()
    args.deadline = time.time() + 60 * args.minutes
    if not args.collect:
        import torch

        args.gpus = args.gpus or [str(i) for i in range(torch.cuda.device_count())]
        for task in args.tasks:
            if not (args.work / "data" / task / "test.jsonl").exists():
                learning_tasks.save(args.work / "data" / task, task)
        run_all(args)
    collect(args)


if __name__ == "__main__":
    main()
