"""Predicted against measured GPU memory of a training process, part by part.

    # the claim: one CUDA GPU with 80 GB, Qwen2.5-0.5B with random weights
    PYTHONPATH=src python benchmarks/memory_plan.py
    # tiny, measures nothing: only shows that the script runs
    PYTHONPATH=src python benchmarks/memory_plan.py --device cpu

With --arms adamw eager no_kept_head eager_no_kept_head half_recomputed checkpointing eager_checkpointing it takes about
four minutes on an H100, and says how well compiled blocks, tiles that the loss head keeps, and recomputation of all or
half of the blocks are predicted.

Every arm is a configuration of run_grpo.py and runs in its own process. The training code loads the model, connects an
optimizer and makes two updates on random tokens. All sequences have maximum length, so that the largest microbatch is
the predicted one. The optimizer state exists from the end of the first update, so the peak of the second update is the
peak of the run. The measurements are bytes in tensors (torch.cuda.memory_allocated), minus what is allocated after an
initial matrix product:

    weights           after loading                           masters           increase from creating them
    gradients         at the optimizer's first step           optimizer state   after the first update, minus masters
                                                                                and weights
    reference         increase from loading it                activations       peak of the second update, minus all
                                                                                other parts

The total is that peak. The CUDA context is not in tensors and therefore not compared. The details report its size
(torch.cuda.mem_get_info, which includes other processes on the GPU).
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Target, write_result
from hydra import compose, initialize_config_dir
from transformers import Qwen2Config, Qwen2ForCausalLM

from offline_grpo.model.load import load_policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.assemble import make_updater
from offline_grpo.run.config import register, typed
from offline_grpo.run.gpu_memory import MemoryRequest, describe, needs_reference_copy, predict
from offline_grpo.run.plan import Plan, make_plan
from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.train.sharding import Replicas
from offline_grpo.train.update import Updater
from offline_grpo.types import Completion, FinishReason, Rollout, Score, TokenBatch

CONF = Path(__file__).parents[1] / "conf"
QWEN2_5_0_5B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = QWEN2_5_0_5B | {
    "vocab_size": 2000,
    "hidden_size": 112,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
}
CHECKPOINTING = "train.gradient_checkpointing=true"
ARMS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "eager": ("model.compile=false",),
    "no_kept_head": ("model.head.kept_gib=0",),
    "eager_no_kept_head": ("model.compile=false", "model.head.kept_gib=0"),
    "half_recomputed": ("train.gradient_checkpointing=auto",),
    "eager_checkpointing": ("model.compile=false", "train.gradient_checkpointing=true"),
    "one_microbatch": ("train.tokens_per_microbatch=32768",),
    "checkpointing": (CHECKPOINTING,),
    "lora_checkpointing": ("model/lora=default", CHECKPOINTING),
    "lora": ("model/lora=default", "train.tokens_per_microbatch=8192"),
    "adamw_8bit": ("train/optimizer=adamw_8bit", CHECKPOINTING),
    "adafactor": ("train/optimizer=adafactor", CHECKPOINTING),
    "reference": ("train.kl_coef=0.05", CHECKPOINTING),
    "padded": ("model.layout=padded",),
    "fp32": ("train.precision=fp32", "train.tokens_per_microbatch=8192"),
}
PARTS = ("policy weights", "fp32 masters", "gradients", "optimizer state", "reference weights", "activations")


def plan_of(folder: Path, args: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """The configuration of an arm: 32 sequences in one update."""
    base = [
        "model=hf",
        f"model.train_id={folder}",
        f"model.device={args.device}",
        f"generation.max_new_tokens={args.completion_tokens}",
        "generation.batch_size=1",
        "eval.enabled=false",
        "data.problems_per_iteration=4",
        "data.rollouts_per_problem=8",
        "train.precision=bf16",
        "train.batch_size=null",
        f"train.tokens_per_microbatch={args.tokens_per_microbatch}",
        "train.gradient_checkpointing=false",
        "train.kl_coef=0",
    ]
    register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return make_plan(typed(compose("config", overrides=[*base, *overrides])))


def random_batch(args: argparse.Namespace, num_sequences: int, vocab_size: int) -> TokenBatch:
    """Random sequences, all of maximum length."""
    torch.manual_seed(0)
    num_tokens = args.completion_tokens
    rows = torch.randint(vocab_size, (num_sequences, args.prompt_tokens + args.completion_tokens)).tolist()
    rollouts = [
        Rollout.of_one_turn(
            row[: args.prompt_tokens],
            Completion(tuple(row[args.prompt_tokens :]), (-1.0,) * num_tokens, FinishReason.LENGTH, (0,) * num_tokens),
            temperature=1.0,
            text="",
            score=Score(0.0, False, {}),
        )
        for row in rows
    ]
    batch = build_batch(rollouts, mask_truncated=False)
    return with_advantages(batch, torch.linspace(-1, 1, num_sequences).tolist())


class Gauge:
    """Bytes allocated in CUDA tensors since the gauge was created; always 0 without CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0
        if device.type == "cuda":
            x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            (x @ x).sum().backward()  # allocates the cuBLAS workspaces of forward and backward
            del x
        self._start = self.now()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start if self._device.type == "cuda" else 0

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start if self._device.type == "cuda" else 0

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def measure(plan: Plan, args: argparse.Namespace, folder: Path, vocab_size: int) -> dict[str, int]:
    """Measured bytes of every part and of the peak."""
    device = torch.device(args.device)
    gauge = Gauge(device)
    train = plan.config.train
    policy = load_policy(
        plan.config.model,
        str(folder),
        layout=plan.layout,
        head=plan.head,
        device=device,
        precision=train.precision,
        train_layer_indices=None,
        gradient_checkpointing=recomputed(plan),
        checkpoint=None,
    )
    weights = gauge.now()
    policy.make_masters()
    masters = gauge.now() - weights
    ranks = Ranks(use_cpu=device.type == "cpu")
    updater: Updater = make_updater(plan, policy, str(folder), folder / "run", ranks, Replicas(ranks))
    reference = gauge.now() - weights - masters
    static = weights + masters + reference
    at_step: list[int] = []
    updater.optimizer.register_step_pre_hook(lambda *_: at_step.append(gauge.now()))
    num_sequences = plan.config.data.problems_per_iteration * plan.config.data.rollouts_per_problem
    batch = random_batch(args, num_sequences, vocab_size)
    updater.run(updater.score(batch), iteration=0)
    state = gauge.now() - static
    gauge.reset_peak()
    metrics = updater.run(updater.score(batch), iteration=1)
    assert metrics["num_updates"] == 1.0, metrics
    gradients = at_step[0] - static
    parts = (weights, masters, gradients, state, reference)
    return dict(zip(PARTS, (*parts, gauge.peak() - sum(parts)), strict=True)) | {"total": gauge.peak()}


def recomputed(plan: Plan) -> float:
    """The share of the blocks; half where it is `auto`, which would recompute none here."""
    return {True: 1.0, False: 0.0, "auto": 0.5}[plan.config.train.gradient_checkpointing]


def predict_parts(plan: Plan, args: argparse.Namespace, config: Qwen2Config) -> dict[str, int]:
    """The planner's prediction for the same parts, without the CUDA context."""
    reference = config if needs_reference_copy(plan) else None
    prompts = (args.prompt_tokens, args.prompt_tokens)
    devices = predict(MemoryRequest(plan, config, reference, prompts, [0], (), [80 * 2**30]), recomputed(plan))
    print("\n".join(describe(devices)))
    found = {part.name: part.num_bytes for part in devices[0].trainer}
    parts = {name: found.get(name, 0) for name in PARTS}
    return parts | {"total": sum(parts.values())}


def run_arm(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and predict one arm in this process."""
    config = Qwen2Config(**(TINY if args.device == "cpu" else QWEN2_5_0_5B))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model: Any = Qwen2ForCausalLM(config)  # transformers' annotation of `to` is wrong
        model.to(torch.bfloat16).save_pretrained(folder)
        build_char_tokenizer(config.max_position_embeddings).save_pretrained(folder)
        plan = plan_of(folder, args, ARMS[args.arm])
        predicted = predict_parts(plan, args, config)
        measured = measure(plan, args, folder, config.vocab_size)
        context = 0
        if args.device != "cpu":
            free, total = torch.cuda.mem_get_info()
            context = total - free - torch.cuda.memory_reserved()
    return {"predicted_bytes": predicted, "measured_bytes": measured, "context_bytes": context}


def run_arm_in_child(arm: str) -> dict[str, Any]:
    """Run one arm in its own process, alone on the GPU. Returns its last output, or its error."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    *table, result = done.stdout.splitlines()
    print(f"{arm}: {' '.join(ARMS[arm])}", *table, sep="\n")
    return json.loads(result)


def relative_error(arm: Mapping[str, Any], part: str) -> float:
    """(predicted - measured) / measured."""
    measured = arm["measured_bytes"][part]
    return (arm["predicted_bytes"][part] - measured) / measured if measured else 0.0


def is_large(arm: Mapping[str, Any], part: str) -> bool:
    """Whether a part's measured size is at least a fiftieth of the total; errors in smaller parts do not matter."""
    return arm["measured_bytes"][part] * 50 >= arm["measured_bytes"]["total"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--prompt-tokens", type=int, default=None, help="prompt tokens per sequence")
    parser.add_argument("--completion-tokens", type=int, default=None, help="completion tokens per sequence")
    parser.add_argument("--tokens-per-microbatch", type=int, default=None)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--arm", choices=list(ARMS), help="run one arm in this process and print its numbers as JSON")
    args = parser.parse_args()
    defaults = (16, 48, 512) if args.device == "cpu" else (128, 896, 16384)
    for name, value in zip(("prompt_tokens", "completion_tokens", "tokens_per_microbatch"), defaults, strict=True):
        setattr(args, name, getattr(args, name) if getattr(args, name) is not None else value)
    return args


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = parse_args()
    if args.arm is not None:
        print(json.dumps(run_arm(args)))
        return
    arms = {arm: run_arm_in_child(arm) for arm in args.arms}
    for arm, result in arms.items():
        if "error" in result:
            print(f"{arm}: {result['error']}")
    ran = {arm: result for arm, result in arms.items() if "error" not in result}
    if args.device == "cpu":
        print(f"{len(ran)} of {len(arms)} arms ran; nothing is measured on a CPU")
        return
    errors = {f"error_{arm}": relative_error(result, "total") for arm, result in ran.items()}
    large = [(result, part) for result in ran.values() for part in PARTS if is_large(result, part)]
    largest_part_error = max(abs(relative_error(result, part)) for result, part in large)
    measured = {"largest_error": max(map(abs, errors.values())), "largest_part_error": largest_part_error, **errors}
    write_result(
        "memory_plan",
        claim="The memory of a training process on a GPU is predicted to within 10%, before any weights are loaded.",
        targets=[Target("largest_error", "<=", 0.10), Target("largest_part_error", "<=", 0.10)],
        settings={key: value for key, value in vars(args).items() if key != "arm"}
        | {"model": QWEN2_5_0_5B, "overrides": ARMS},
        measured=measured,
        details={
            "arms": arms,
            "errors_by_part": {
                arm: {part: round(relative_error(result, part), 4) for part in PARTS} for arm, result in ran.items()
            },
        },
    )


if __name__ == "__main__":
    main()
