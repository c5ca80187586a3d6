"""Time of one iteration (sample, score, update) of the default job against TRL's GRPOTrainer doing the same work.

    python benchmarks/iteration_vs_trl.py [KEY=VALUE ...]        # overrides of the default configuration

Both arms start from the same tiny model. They have the same reference, prompts (compared token by token before the
timing), rewards, group size, loss, optimizer and learning rate, and make one update per iteration from one microbatch.
Neither evaluates, writes checkpoints or prints; ours keeps its rollouts on disk, as by default. They alternate in
blocks within one process. Each arm is measured with every thread count, and the claim compares the fastest of each.

Arms:
    ours         the training loop of run_grpo.py with its default configuration
    all_groups   the same with train.drop_zero_signal_groups=false: it trains on every sampled sequence, as TRL does
    trl          GRPOTrainer with transformers' generate and gradient checkpointing off (its default is on)
TRL has another generator without a server, transformers' continuous batching. The script tries it first and records the
outcome.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import Target, Timings, write_result
from hydra import compose, initialize_config_dir
from trl_arm import WARMUP_BLOCKS, Interleave, MethodTimes, make_trainer

from offline_grpo.generation.judging import Judgement
from offline_grpo.interfaces import RunListener
from offline_grpo.loop import Loop
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run import assemble, begin
from offline_grpo.run.config import as_plain, register, typed
from offline_grpo.run.plan import Plan, make_plan
from offline_grpo.run.run_dir import RunDir
from offline_grpo.run.signals import StopSignal
from offline_grpo.run.state import Run
from offline_grpo.types import Metrics

ROOT = Path(__file__).parents[1]
TRAINING_ONLY = (
    "model.device=cpu",
    "eval.enabled=false",
    "checkpoint.enabled=false",
    "data.shuffle=false",
    f"cache_dir={ROOT}/outputs/.cache",
)
ALL_GROUPS = "train.drop_zero_signal_groups=false"
TRL_PHASES = ("_generate", "_calculate_rewards", "_generate_and_score_completions", "compute_loss", "training_step")


@dataclass
class Recorder(RunListener):
    """Keeps the metrics of every iteration."""

    records: list[Metrics] = field(default_factory=list)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self.records.append(metrics)

    def medians(self, names: Sequence[str], *, after: int) -> dict[str, float]:
        return {name: statistics.median(record.get(name, 0.0) for record in self.records[after:]) for name in names}


class OurArm:
    """The training loop of the default job, run one block of iterations at a time."""

    def __init__(self, overrides: Sequence[str], scratch: Path) -> None:
        register()
        with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("config", overrides=[*TRAINING_ONLY, *overrides])
        self.recorder = Recorder()
        run = Run(StopSignal(), ExitStack())  # nothing to let go of: it samples in process
        run.config, run.plain = typed(cfg), as_plain(cfg)
        run.plan, run.folder, run.resume = make_plan(run.config), RunDir(scratch), None
        run.ranks, run.listeners = Ranks(use_cpu=True), [self.recorder]
        begin.servers(run)
        assemble.check_model(run)
        assemble.load_policy(run)
        assemble.connect_engines(run)
        assemble.prepare_training(run)
        self.plan: Plan = run.plan
        self.policy, self.loop = run.policy, Loop(run)
        self.loop.push_now()
        run.source.start(0, None)

    def run(self, num_iterations: int) -> None:
        first = len(self.recorder.records)
        self.loop.run.config.train.iterations = first + num_iterations
        for iteration in range(first, first + num_iterations):
            self.loop.iterate(iteration)


def trl_settings(plan: Plan) -> dict[str, Any]:
    """The settings of the default job under GRPOConfig's names."""
    data, train, loss, optimizer = plan.config.data, plan.config.train, plan.loss, plan.optimizer
    num_sequences = data.problems_per_iteration * data.rollouts_per_problem
    assert train.batch_size == num_sequences, "one microbatch per update, so that TRL can be given the same"
    return {
        "per_device_train_batch_size": num_sequences,
        "gradient_accumulation_steps": 1,
        "num_generations": data.rollouts_per_problem,
        "max_completion_length": plan.sampling.max_new_tokens,
        "temperature": plan.sampling.temperature,
        "beta": loss.kl_coef,
        "loss_type": "grpo",
        "epsilon": loss.clip_low,  # type: ignore[attr-defined]
        "scale_rewards": "group",
        "learning_rate": train.lr,
        "weight_decay": train.weight_decay,
        "adam_beta1": optimizer.beta1,  # type: ignore[attr-defined]
        "adam_beta2": optimizer.beta2,  # type: ignore[attr-defined]
        "adam_epsilon": optimizer.eps,  # type: ignore[attr-defined]
        "max_grad_norm": train.grad_clip,
        "logging_steps": 1,
        "seed": plan.config.seed,
    }


def trl_trainer(ours: OurArm, callbacks: list[Any], **settings: Any) -> Any:
    plan, policy = ours.plan, ours.policy
    assert plan.data.train is not None
    train, task = plan.data.train, plan.data.task
    problems = {problem.problem_id: problem for problem in train}

    def reward(completions: Sequence[Any], problem_id: Sequence[str], **_: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            Judgement(task, problems[key], text).result().reward for key, text in zip(problem_id, texts, strict=True)
        ]

    rows = [{"prompt": [dict(message) for message in p.messages], "problem_id": p.problem_id} for p in train]
    trainer = make_trainer(
        str(policy.model.name_or_path), policy.tokenizer, rows, reward, callbacks, **(trl_settings(plan) | settings)
    )
    prompts, codec = [row["prompt"] for row in rows], TokenizerCodec(policy.tokenizer)
    if trainer._tokenize_prompts(prompts)[0] != [codec.encode(problem.messages) for problem in train]:
        raise AssertionError("TRL's prompts have other token ids than ours")
    return trainer


@dataclass(frozen=True)
class Measurement:
    """One of our arms against TRL, with one thread count."""

    timings: Timings  # seconds per block
    phases_s: dict[str, dict[str, float]]
    work: dict[str, dict[str, float]]


def measure(overrides: Sequence[str], *, blocks: int, block: int) -> Measurement:
    with tempfile.TemporaryDirectory() as scratch:
        ours = OurArm(overrides, Path(scratch))
    interleave = Interleave(lambda: ours.run(block), updates_per_block=block)
    trainer = trl_trainer(ours, [interleave], max_steps=(blocks + WARMUP_BLOCKS) * block)
    times = MethodTimes(trainer, TRL_PHASES)
    trainer.train()
    warmup = WARMUP_BLOCKS * block
    history = [row for row in trainer.state.log_history if "reward" in row][warmup:]
    medians = {name: statistics.median(seconds[warmup:]) for name, seconds in times.seconds.items()}
    num_sequences = trainer.args.per_device_train_batch_size
    return Measurement(
        timings=interleave.timings,
        phases_s={
            "ours": ours.recorder.medians(("time/generate_s", "time/train_s", "time/sync_s"), after=warmup),
            "trl": {
                "generate_s": medians["_generate"],
                "rewards_s": medians["_calculate_rewards"],
                "reference_and_rest_s": medians["_generate_and_score_completions"]
                - medians["_generate"]
                - medians["_calculate_rewards"],
                "forward_s": medians["compute_loss"],
                "backward_s": medians["training_step"]
                - medians["compute_loss"]
                - medians["_generate_and_score_completions"],
            },
        },
        work={
            "ours": ours.recorder.medians(
                ("num_completion_tokens", "num_groups_trained", "reward_mean", "num_updates"), after=warmup
            ),
            "trl": {
                "num_completion_tokens": statistics.median(row["completions/mean_length"] for row in history)
                * num_sequences,
                "num_groups_trained": num_sequences / trainer.num_generations,
                "reward_mean": statistics.median(row["reward"] for row in history),
                "num_updates": 1.0,
            },
        },
    )


def try_continuous_batching(overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds per iteration of TRL with transformers' continuous batching, or the error that prevents it."""
    with tempfile.TemporaryDirectory() as scratch:
        ours = OurArm(overrides, Path(scratch))
    interleave = Interleave(lambda: None, updates_per_block=1)
    trainer = trl_trainer(ours, [interleave], max_steps=1 + WARMUP_BLOCKS, use_transformers_continuous_batching=True)
    try:
        trainer.train()
    except (RuntimeError, ValueError, ImportError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"seconds_per_iteration": interleave.timings.min_s("trl")}


def measure_threads(num_threads: int, args: argparse.Namespace) -> dict[str, Measurement]:
    torch.set_num_threads(num_threads)
    arms = {"ours": args.overrides, "all_groups": [*args.overrides, ALL_GROUPS]}
    return {arm: measure(overrides, blocks=args.blocks, block=args.block) for arm, overrides in arms.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the default configuration, KEY=VALUE")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of torch threads to try")
    parser.add_argument("--blocks", type=int, default=6, help="timed blocks per arm")
    parser.add_argument("--block", type=int, default=5, help="iterations per block")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads[0])
    continuous_batching = try_continuous_batching(args.overrides)
    by_threads = {num_threads: measure_threads(num_threads, args) for num_threads in args.threads}

    def fastest_s(arm: str, *, against: str) -> float:
        """Median seconds per iteration with the thread count that is fastest for this arm."""
        return min(measurements[against].timings.median_s(arm) for measurements in by_threads.values()) / args.block

    ratios = {arm: fastest_s("ours", against=arm) / fastest_s("trl", against=arm) for arm in ("ours", "all_groups")}
    measured = {
        "iteration_ratio": ratios["ours"],
        "iteration_ratio_all_groups": ratios["all_groups"],
        "ours_s": fastest_s("ours", against="ours"),
        "ours_all_groups_s": fastest_s("ours", against="all_groups"),
        "trl_s": min(fastest_s("trl", against=arm) for arm in ratios),
        **{
            f"{arm}_ratio_{threads}_threads": measurement.timings.ratio("ours", "trl")
            for threads, measurements in by_threads.items()
            for arm, measurement in measurements.items()
        },
    }
    write_result(
        "iteration_vs_trl",
        claim="On a CPU, an iteration of the main job takes at most 0.33 of the time that TRL's GRPOTrainer "
        "takes for the same.",
        targets=[Target("iteration_ratio", "<=", 0.33), Target("iteration_ratio_all_groups", "<=", 0.33)],
        settings={**vars(args), "trl": version("trl")},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={
            "trl_with_continuous_batching": continuous_batching,
            "by_threads": {
                threads: {arm: asdict(m) | {"timings": m.timings.summary("trl")} for arm, m in measurements.items()}
                for threads, measurements in by_threads.items()
            },
        },
    )


if __name__ == "__main__":
    main()
