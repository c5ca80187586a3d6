"""Learning curves of a real model: five losses and TRL's GRPOTrainer on texts, a calculator as environment, as agent,
asynchronously and by TRL's environment_factory, with filters and without, objectives on one recording, and a search
over what the demonstrations' experiments say; several seeds, many runs at a time.

    python benchmarks/learning.py WORK --model FOLDER --minutes 18      # all cards that are visible, 4 runs on each
    python benchmarks/learning.py WORK --model FOLDER --tasks calculator
    python benchmarks/learning.py WORK --model WITNESS --tasks picture_sums           # a folder of witness_vl.py
    python benchmarks/learning.py WORK --collect                        # the result again, from what is in WORK
    python benchmarks/learning.py WORK --model FOLDER --small           # a few tiny runs on the CPU

FOLDER is a model in transformers' format; curves of SmolLM2-135M-Instruct are in the results. The problems are made by
reasoning-gym and the experiment of the calculator, unless WORK/data has them (`learning_tasks.py`). All runs of a task
have the same prompts, rewards, batch, schedule and learning rate; those named after a loss differ in it alone, the
others in what EXTRAS, EPISODES and REPLAYS say. Each worker runs jobs one after the other on its share of a card and of
the cores; its vLLM server serves all of our jobs, because each run's first push replaces the weights. Jobs run in the
order of WORTH, and none begins that cannot end in time, judged by those of its kind that have ended. What is cut off
loses only what is in flight: the same command later does the rest.
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import learning_tasks
import numpy as np
from common import RESULTS, ROOT, Target, parser_of, write_result

from offline_grpo.engine.http import choose_port
from offline_grpo.eval.statistics import mean_interval, t_975
from offline_grpo.report.runs import load_run

LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
LR, UPDATES = 1e-5, 2
SIZES: Mapping[str, Mapping[str, int]] = {
    "calculator": {"iterations": 12, "eval_interval": 2},
    "search": {"iterations": 10, "eval_interval": 1},
}
"""Of tasks that have others than the rest."""
KV_BYTES = 4 << 30
MAX_LEN = 2048
EXTRAS: Mapping[str, Sequence[str]] = {
    "terse": ["train.lr=3e-5", "task.reward=learning_tasks:terse", "train.kl_coef=0.001"],
    "lr_1e-4": ["train.lr=1e-4", "train.kl_coef=0.001"],
    "lr_3e-6": ["train.lr=3e-6"],
    "lr_3e-5": ["train.lr=3e-5"],
    "kl_0.05": ["train.kl_coef=0.05"],
    "resample": ["data.resample_zero_signal=true"],
    "group_16": ["data.problems_per_iteration=16", "data.rollouts_per_problem=16"],
    "lora": ["model/lora=default", "train.lr=1e-4"],
    "nf4": ["model/lora=default", "train.lr=1e-4", "model.quantization=nf4"],
    "filters": ["generation.top_p=0.95", "generation.top_k=20"],
    "filtered_eval": ["eval.top_p=0.95", "eval.top_k=20"],
}
"""Arm -> what it changes of the arm grpo, or environment. The first two look for a collapse."""
EPISODES: Mapping[str, Sequence[str]] = {
    "environment": ["task=environment"],
    "filters": ["task=environment"],
    "async": ["task=environment", "mode=async", f"rollouts.max_staleness={UPDATES}"],
    "agent": ["task=agent", "task.agent=learning_tasks:solve"],
}
"""Arm of the calculator -> what it has of its own."""
OBJECTIVES = ("group_std", "group_mean", "batch_std", "rloo", "reinforce_baseline", "maxrl", "passk")
RECORDED = "sums-grpo-0"
"""The run whose rollouts are replayed."""
REPLAYS: Mapping[str, Sequence[str]] = {
    "replay": ["task.reward=learning_tasks:last_number"],
    "parts": ["task.reward=learning_tasks:right_and_brief", "rollouts.rescore=true"],
}
"""Tasks of which each arm is an objective on the recording, as it is or with a reward of two parts."""
WORTH: Sequence[tuple[str, Sequence[str], range]] = (
    ("sums", ("grpo",), range(1)),
    ("longer_sums", ("resample",), range(1)),
    ("sums", ("grpo", "filters", "filtered_eval"), range(5)),
    ("calculator", ("trl", *EPISODES), range(5)),
    ("replay", OBJECTIVES, range(5)),
    ("parts", ("gdpo", "group_std"), range(5)),
    ("sums", ("trl",), range(3)),
    ("products", ("trl", "grpo"), range(3)),
    ("search", tuple(learning_tasks.SEARCH), range(1)),
    ("sums", ("lr_3e-5", "lr_3e-6", "kl_0.05"), range(3)),
    ("longer_sums", ("trl", "grpo"), range(3)),
    ("longer_sums", ("resample", "group_16"), range(3)),
    ("picture_sums", ("trl", "in_process"), range(5)),
    *((task, ("trl", "grpo"), range(5)) for task in ("sums", "products", "longer_sums")),
    ("sums", ("terse", "lr_1e-4", "lora", "nf4", "fp8"), range(3)),
    *((task, LOSSES, range(5)) for task in ("sums", "products", "longer_sums")),
    ("instructions", ("trl", *LOSSES), range(5)),
)
"""Tasks, arms and seeds in the order in which they run, because the time may end before the last: what is known least
comes first, and of that what takes least.
"""
EXPECTED_S = {"resample": 420, "TRL's calculator": 200, "TRL's": 240, "calculator": 150, "replay": 90, "search": 80}
"""Kind of job -> how long it takes, until one of its kind has ended; 200 if it is not here."""
MATCHED = {"calculator": "environment", "picture_sums": "in_process"}
"""Task -> our arm that TRL's is compared with; grpo if it is not here."""
RESULT_OF = {"calculator": "calculator", "search": "search", "picture_sums": "learning_pictures"}
RESULT_OF |= dict.fromkeys(REPLAYS, "paired_objectives")
"""Task -> its result; learning if it is not here."""
CLAIMS = {
    "learning": "A small real model learns with five losses, and with TRL alike, within the intervals over seeds",
    "calculator": "A small real model learns to call a tool as TRL's environment_factory teaches it, and no slower",
    "search": "The calculator's experiment with one thing changed at a time: held-out pass@1 after each iteration",
    "learning_pictures": "A small real model that sees learns sums whose numbers are pictures, as with TRL",
    "paired_objectives": "Objectives on the same recorded rollouts of a small real model, with the same seeds",
}
LEVELS = (0.5, 0.9)
SECONDS = (
    "of iterations: sampling, updates and weight sync, without the start; evaluations do not count, but for async: "
    "it samples meanwhile. Runs share cards: `neighbours` is how many others there were on average"
)
IN_PROCESS = ("lora", "nf4", "in_process")
"""Arms that sample without a server; of the first two, others would replace the base weights there."""
SERVED: Mapping[str, Sequence[str]] = {"fp8": ["--quantization", "fp8"]}
"""Arm -> options of a server of its own."""
SERIES = ("reward_mean", "success_rate", "entropy", "completion_tokens_mean", "kl_divergence", "clip_frac", "grad_norm")
SERIES += (
    "alignment/diff_abs_mean",
    "sync/probe_diff_abs_mean",
    *(f"mismatch/{x}" for x in ("kl_k3", "ess_frac", "ratio_mean")),
)
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

    @property
    def kind(self) -> str:
        """Of those that take about the same time."""
        if not self.is_ours:
            return f"TRL's {self.task}" if self.task in learning_tasks.EXPERIMENTS else "TRL's"
        own = {"resample", *IN_PROCESS}
        return "replay" if self.task in REPLAYS else self.arm if self.arm in own else self.task

    @property
    def data(self) -> str:
        return "sums" if self.task in REPLAYS else self.task


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
        command += ["--log-dir", str(log.parent), "--max-model-len", str(MAX_LEN), "--max-num-seqs", "256"]
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
        """Its exit code; None if the time ran out. What the result has of it is kept, if it came to its end."""
        folder = self.args.work / job.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        args = sized(self.args, job.task)
        needs_server = job.is_ours and job.arm not in IN_PROCESS and job.task != "search" and not args.in_process
        url = self.serve(SERVED.get(job.arm, ())) if needs_server else ""
        command = our_command(job, args, folder, url) if job.is_ours else trl_command(job, args)
        began = time.time()
        process = self.start(command, folder / "log.txt")
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=max(1.0, min(self.args.timeout_s, self.args.deadline - began)))
        end(process)
        wall = {"rc": code, "kind": job.kind, "began": began, "wall_s": time.time() - began, "card": self.card}
        (folder / "job.json").write_text(json.dumps(wall))
        if code == 0:
            (folder / "curve.json").write_text(json.dumps(rounded(curve_of(folder))))
            for name in ("job.json", "curve.json") if self.args.keep else ():
                (self.args.keep / job.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / name, self.args.keep / job.name)
        return code

    def stop(self) -> None:
        for server, _ in self.servers.values():
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                end(server)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and of those that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def sized(args: argparse.Namespace, task: str) -> argparse.Namespace:
    """The settings with the sizes of a task."""
    return argparse.Namespace(**{**vars(args), **({} if args.small else SIZES.get(task, {}))})


def our_command(job: Job, args: argparse.Namespace, folder: Path, url: str) -> list[str]:
    if job.task == "search":  # the experiment as it is, in process; a GPU takes no trees and has nothing to compile
        own = f"experiment=calculator_smollm2 train.iterations={args.iterations} eval.interval={args.eval_interval}"
        own += " eval.num_ids=all eval.replicates=2 checkpoint.enabled=false model.layout=auto model.compile=false"
        own += " train.batch_size=null generation.batch_size=96"
        own += f" seed={job.seed} model.gguf_file=null model.train_id={args.model} hydra.run.dir={folder}/run"
        templates = args.work / "data" / job.task
        words = [word.replace("TEMPLATES", str(templates)) for word in learning_tasks.SEARCH[job.arm]]
        own_memory = "train.tokens_per_microbatch=2048"  # beside the servers of other tasks
        return [sys.executable, str(ROOT / "run_grpo.py"), *own.split(), *args.overrides, own_memory, *words]
    on_gpu = ["train.precision=bf16", "train.batch_size=null", "train.tokens_per_microbatch=16384"]
    on_cpu = ["train.precision=fp32", "train.batch_size=8", "model.device=cpu"]
    loss = job.arm if job.arm in LOSSES else "grpo"
    num_held_out = len((args.work / "data" / job.data / "test.jsonl").read_text().splitlines())
    served = f"generation=vllm_server generation.base_url={url} weight_sync={job.sync}"
    served += f" weight_sync.interval={args.eval_interval}" if job.task in REPLAYS else ""
    words = f"""
        model=hf {"" if job.arm in IN_PROCESS or args.in_process else served}
        generation.max_new_tokens={limit(job, args)} checkpoint.enabled=false eval.ks=[1]
        seed={job.seed}
        train/loss={loss} train.updates_per_iteration={UPDATES} train.iterations={args.iterations}
        train.lr={LR} train.schedule=constant train.kl_coef=0 train.drop_zero_signal_groups=false
        eval.interval={args.eval_interval} eval.num_ids={min(num_held_out, args.eval_problems)}
        eval.replicates={args.eval_samples}
    """
    return [
        *(sys.executable, str(ROOT / "run_grpo.py"), *words.split(), *task_words(job, args)),
        *(f"model.train_id={args.model}", f"hydra.run.dir={folder}/run"),
        *(on_cpu if args.small else on_gpu),
        *EXTRAS.get(job.arm, ()),
        *args.overrides,
    ]


def task_words(job: Job, args: argparse.Namespace) -> list[str]:
    """What a run of ours is about: texts that a reward judges, the recording of such a run, or episodes."""
    data = args.work / "data" / job.data
    if job.task in REPLAYS:
        replay = ["rollouts=replay", f"rollouts.path={args.work / RECORDED / 'run'}", "rollouts.shuffle=true"]
        replay += [f"train/advantage={job.arm}", *REPLAYS[job.task]]
        return ["task=dataset", f"task.path={data}", "scoring.workers=2", *replay]
    batch = [f"data.problems_per_iteration={args.prompts}", f"data.rollouts_per_problem={args.group}"]
    if job.task not in learning_tasks.EXPERIMENTS:
        reward = f"task.reward=learning_tasks:{learning_tasks.REWARDS[job.task]}"
        pictures = ["task.image_field=images"] if job.task == "picture_sums" else []
        return ["task=dataset", f"task.path={data}", "scoring.workers=2", reward, *pictures, *batch]
    episodes = learning_tasks.episodes(data)
    own = [] if job.arm == "agent" else ["task.environment=" + episodes["world"]]
    limits = [f"task.{name}={json.dumps(value)}" for name, value in episodes["limits"].items()]
    # Compiling the model would take longer than all iterations.
    words = [f"task.path={data}", "task.prompt_field=messages", "scoring.episodes=256", "model.compile=false"]
    return [*EPISODES[job.arm], *batch, *own, *words, *limits, f"model.chat_template={data / learning_tasks.TEMPLATE}"]


def limit(job: Job, args: argparse.Namespace) -> int:
    """Tokens of the longest completion, or of all replies of an episode."""
    if args.tokens is None and job.task in learning_tasks.EXPERIMENTS:
        return learning_tasks.episodes(args.work / "data" / job.task)["tokens"]
    return args.tokens or learning_tasks.TOKENS[job.data]


def trl_command(job: Job, args: argparse.Namespace) -> list[str]:
    settings = {
        "model": str(args.model),
        "data": str(args.work / "data" / job.task),
        "reward": learning_tasks.REWARDS.get(job.task),
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
        "max_len": MAX_LEN,
        "threshold": 1.0,
        "microbatch": 2 if args.small else 32,
        "on_cpu": args.small,
    }
    script = str(Path(__file__).with_name("learning_trl.py"))
    return [sys.executable, script, str(args.work / job.name), json.dumps(settings)]


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Those that are asked for and have not ended before, in the order of their worth."""
    sync = "reload" if args.small else "ipc"
    planned = [Job(task, arm, seed, sync) for task, arms, seeds in WORTH for seed in seeds for arm in arms]
    return [
        job
        for job in dict.fromkeys(planned)
        if job.task in args.tasks and (not args.arms or job.arm in args.arms) and job.seed < args.seeds
        if not is_done(args.work / job.name)
    ]


def is_done(folder: Path) -> bool:
    """Whether a run of this name ended before: its curve is kept."""
    return (folder / "job.json").is_file() and json.loads((folder / "job.json").read_text())["rc"] == 0


class Queue:
    """Jobs, of which workers take the next that can begin."""

    def __init__(self, args: argparse.Namespace, jobs: Sequence[Job]) -> None:
        self.args, self.waiting, self.lock = args, list(jobs), threading.Lock()

    def take(self) -> Job | None:
        """The first that can end in time, and whose recording is there."""
        left_s, recording = self.args.deadline - time.time(), self.args.work / RECORDED
        has_recording = is_done(recording) and (recording / "run").exists()
        with self.lock:
            ended = [json.loads(path.read_text()) for path in self.args.work.glob("*/job.json")]
            for job in self.waiting:
                took = [each["wall_s"] for each in ended if each.get("kind") == job.kind and each["rc"] == 0]
                takes_s = np.median(took) if took else EXPECTED_S.get(job.kind, 200)
                if 1.15 * takes_s < left_s and (has_recording or job.task not in REPLAYS):
                    self.waiting.remove(job)
                    return job
        return None

    def work(self, worker: Worker) -> None:
        """Until nothing waits that can begin."""
        while (job := self.take()) is not None:
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

    def again(self, job: Job) -> None:
        with self.lock:
            self.waiting.insert(0, job)


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
        for server, _ in (each for worker in workers for each in worker.servers.values()):
            server.terminate()  # it stops vLLM
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
    if not len(held_out):
        return None
    counted = seconds - np.array([metrics.get("time/eval_s", 0.0) for metrics in history.train.values()])
    if "-async-" in folder.name:  # evaluations count, the first one too: what is trained on next is sampled meanwhile
        counted = seconds + history.series("train/time/start_eval_s").values[0] * (np.arange(len(seconds)) == 0)
    trained = np.concatenate([[0.0], np.cumsum(counted)])
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


def with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean, and its 95% interval if there are several values."""
    mean = {name: float(np.mean(values))}
    if len(values) < 2:
        return mean
    low, high = mean_interval(np.array(values)[:, None])
    return {**mean, f"{name}/low": float(low[0]), f"{name}/high": float(high[0])}


def neighbours(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> float:
    """How many other runs there were on its card, on average over its time."""
    began, ended = run["began"], run["began"] + run["wall_s"]
    beside = [each for each in runs if "began" in each and each["card"] == run["card"]]
    times = [(each["began"], each["began"] + each["wall_s"]) for each in beside]
    return sum(max(0.0, min(ended, end) - max(began, start)) for start, end in times) / run["wall_s"] - 1


def of_arm(runs: Sequence[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What is measured of the runs of an arm, one for each seed."""
    finals = with_interval("last", [run["pass@1"][-1] for run in runs])
    measured = {"first": float(np.mean([run["pass@1"][0] for run in runs])), "seeds": len(runs)}
    measured |= {key.removeprefix("last/"): value for key, value in finals.items()}
    measured["iteration_s"] = float(np.median([s for run in runs for s in run["iteration_s"][1:] or [math.nan]]))
    if all("began" in run for run in runs):
        measured["neighbours"] = float(np.mean([neighbours(run, others) for run in runs]))
    for level in LEVELS if runs[0]["task"] in learning_tasks.EXPERIMENTS else ():
        seconds = [s for run in runs if (s := seconds_to(level, [run])) < math.inf]
        measured[f"seeds_to_{level}"] = len(seconds)
        measured |= with_interval(f"seconds_to_{level}", seconds) if seconds else {}
    return measured


def beside_trl(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What is measured of an arm of ours and of TRL's, which differ in the trainer alone."""
    pairs = [[[run["pass@1"][i] for run in runs] for runs in (ours, theirs)] for i in range(len(ours[0]["steps"]))]
    found = [apart(*pair) for pair in pairs]
    level = float(min(LEVELS[-1], *(np.mean(arm) for arm in pairs[-1])))
    times = {"ours": seconds_to(level, ours), "trl": seconds_to(level, theirs)}
    return {
        "minus_trl": found[-1][0],
        "minus_trl_half": found[-1][1],
        "evaluations_within_frac": sum(abs(d) <= half for d, half in found[1:]) / (len(found) - 1),
        "level": level,
        "ours_to_level_s": times["ours"],
        "trl_to_level_s": times["trl"],
        "ours_over_trl": times["ours"] / times["trl"],
    }


def collect(args: argparse.Namespace) -> None:
    """Write the results of all that is in WORK."""
    runs: dict[str, dict[str, Any]] = {}
    for path in sorted(args.work.glob("*-*-*/job.json")):
        folder, job = path.parent, json.loads(path.read_text())
        task, _, rest = folder.name.partition("-")
        arm, _, seed = rest.rpartition("-")
        curve = curve_of(folder) or {}
        done = bool(curve) and curve["steps"][-1] == sized(args, task).iterations
        runs[folder.name] = rounded({"task": task, "arm": arm, "seed": int(seed), "done": done, **job, **curve})
        runs[folder.name] |= {"began": job["began"]} if "began" in job else {}
    for name in CLAIMS:
        of_it = {key: run for key, run in runs.items() if RESULT_OF.get(run["task"], "learning") == name}
        if any(run["task"] in args.tasks for run in of_it.values()):
            write(args, name, of_it, runs.values())


def write(
    args: argparse.Namespace, name: str, runs: Mapping[str, dict[str, Any]], others: Collection[Mapping[str, Any]]
) -> None:
    """One result. The runs of `others` may have been neighbours."""
    measured: dict[str, Any] = {"num_runs": len(runs), "num_done": sum(run["done"] for run in runs.values())}
    targets: list[Target] = []
    for task in dict.fromkeys(run["task"] for run in runs.values()):
        arms: dict[str, list[dict[str, Any]]] = {}
        for run in runs.values():
            if run["task"] == task and run["done"]:
                arms.setdefault(run["arm"], []).append(run)
        for arm, found in arms.items():
            measured |= {f"{task}/{arm}/{key}": value for key, value in of_arm(found, others).items()}
        ours, theirs = arms.get(MATCHED.get(task, "grpo"), []), arms.get("trl", [])
        if len(ours) > 1 and len(theirs) > 1:
            measured |= {f"{task}/{key}": value for key, value in beside_trl(ours, theirs).items()}
            targets.append(Target(f"{task}/evaluations_within_frac", ">=", 0.8))
            targets += [Target(f"{task}/ours_over_trl", "<=", 1.0)] if task in learning_tasks.EXPERIMENTS else []
    settings = {key: str(vars(args)[key]) for key in sorted(vars(args).keys() - {"work", "model", "keep", "deadline"})}
    measured = rounded({key: value for key, value in measured.items() if math.isfinite(value)})
    write_result(
        str(Path(args.out) / name),
        claim=CLAIMS[name],
        targets=[target for target in targets if target.metric in measured],
        settings=settings | {"sizes": SIZES, "seconds": SECONDS},
        measured=measured,
        details=runs,
    )
    if args.keep:
        shutil.copy(RESULTS / args.out / f"{name}.json", args.keep)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, ".")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--gpus", nargs="+", default=None, help="cards (default: all that are visible)")
    parser.add_argument("--workers", type=int, default=4, help="runs at the same time on each card")
    tasks = [*learning_tasks.TOKENS, *REPLAYS, *learning_tasks.EXPERIMENTS, "search"]
    of_text = [task for task in tasks if task != "picture_sums"]
    parser.add_argument("--tasks", nargs="+", default=of_text, choices=tasks)
    parser.add_argument("--arms", nargs="+", default=None)
    sizes = {"seeds": 5, "iterations": 60, "prompts": 32, "group": 8}
    for name, default in {**sizes, "eval-interval": 10, "eval-problems": 256, "eval-samples": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=None, help="longest completion (default: the task's)")
    parser.add_argument("--timeout-s", type=float, default=540.0, help="of one job")
    parser.add_argument("--keep", type=Path, help="a folder that gets each job's curve as soon as it ends")
    parser.add_argument("--in-process", action="store_true", help="our jobs sample without a server")
    parser.add_argument("--collect", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.iterations, args.prompts, args.group, args.tokens = 2, 4, 2, args.tokens or 8
        args.eval_interval, args.eval_problems, args.eval_samples = 1, 4, 1
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    args.work = args.work.resolve()
    return args


def main() -> None:
    args = parse()
    args.deadline = time.time() + 60 * args.minutes
    if not args.collect:
        import torch

        args.gpus = args.gpus or [str(i) for i in range(torch.cuda.device_count())]
        for task in {job.data for job in jobs_of(args)}:
            if not (args.work / "data" / task).exists():
                learning_tasks.save(args.work / "data" / task, task)
        run_all(args)
    collect(args)


if __name__ == "__main__":
    main()
