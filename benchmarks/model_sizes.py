"""Model size against memory and speed of training on one GPU: full, full with offload, LoRA, and LoRA of attention
alone. Random weights, made on the device.

    # about 2 minutes; also 1.7b (2), 4b (3), 8b (4), or tiny with --device cpu (seconds)
    python benchmarks/model_sizes.py --size 0.6b
    # a mixture of experts: all of it, and adapters of attention
    python benchmarks/model_sizes.py --size 3b_a0.6b --arms full lora_attention
    python benchmarks/model_sizes.py --size 30b_a3b --arms lora_attention
    # with a server's KV cache beside it, simulated
    python benchmarks/model_sizes.py --size 8b --server-gib 8 --arms offload

Shapes: Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Llama-3.1-8B, a mixture of experts of 3B, Qwen3-30B-A3B. Every arm runs in
its own process: the model with masters of its own, as weight_sync=shared_vllm needs them, one update to warm up and two
that are timed, of sequences of equal length (--num-sequences of 1024 tokens, 200 of them the prompt) in microbatches of
8192 tokens. The weights stand for the server's; --server-gib GiB more stand for its KV cache and the rest of its share.
An arm that the memory plan refuses is not run.

    peak       the most that was in tensors (torch.cuda.max_memory_allocated)   card    in use on the card, beside the
                                                                                        simulated server,
    plan       what the memory plan predicts, without CUDA context                      as the driver counts it, at the
                                                                                        end
    step       seconds of the optimizer's step and of publishing the weights    host    resident memory of the process
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from common import Target, expect_made_up_logprobs, parser_of, write_result
from our_trainer import updater_of
from shapes import SIZES
from transformers import AutoModelForCausalLM, PretrainedConfig

from offline_grpo.config.compose import composed, register, typed
from offline_grpo.config.parts import Plan, make_plan
from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import blocks_of
from offline_grpo.model.layouts import layouts_for
from offline_grpo.model.load import prepare
from offline_grpo.model.offload import offload_inputs
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.quantization import settle_nf4
from offline_grpo.model.scoring import Scoring
from offline_grpo.model.tiles import tile_mlps
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.placement.ranks import Ranks
from offline_grpo.start.memory import GIB, MemoryRequest, check, choose_way, describe
from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.train.sharding import Sharding
from offline_grpo.types import Completion, FinishReason, Rollout, Score, TokenBatch

ATTENTION = "model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
ARMS = {
    "full": (),
    "offload": ("train.optimizer.offload=true",),
    "lora": ("model/lora=default",),
    "lora_attention": ("model/lora=default", ATTENTION),
}
ROUNDS = 2


def plan_of(folder: Path, args: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """The configuration of an arm: 32 sequences in one update."""
    base = f"""
        model=hf model.train_id={folder} model.device={args.device} generation.max_new_tokens={args.completion_tokens}
        generation.batch_size=1 eval.enabled=false data.problems_per_iteration=4 data.rollouts_per_problem=8
        train.precision=bf16 train.batch_size=null train.tokens_per_microbatch={args.tokens_per_microbatch}
        train.gradient_checkpointing=false train.activation_offload=false train.kl_coef=0
    """
    register()
    return make_plan(typed(composed([*base.split(), *overrides])))


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
    batch = build_batch(rollouts)
    return with_advantages(batch, torch.linspace(-1, 1, num_sequences).tolist())


def make_policy(
    plan: Any, config: PretrainedConfig, device: torch.device, recompute: float, *, is_shared: bool = True
) -> Policy:
    """As `load_policy`, but without files. `is_shared`: a server reads the weights, too."""
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if plan.config.model.quantization == "nf4":
        to_nf4(model)
    trained: Any = prepare(model, plan.config.model, gradient_checkpointing=recompute)
    if plan.config.model.mlp_tile_tokens is not None:
        tile_mlps(blocks_of(model), plan.config.model.mlp_tile_tokens)
    if plan.config.train.activation_offload is True:
        offload_inputs(trained)
    scoring = Scoring(trained.to(device), layouts_for(plan.layout, device, torch.bfloat16)[0], plan.head)
    settle_layout(scoring, plan.layout, device)
    settle_compile(scoring, plan.config.model.compile, device)
    policy = Policy(scoring, build_char_tokenizer(4096))
    if is_shared:
        policy.become_shared(before_publish=lambda: None)
    return policy


def to_nf4(model: Any) -> None:
    """Quantise the linear layers of blocks in place, as `load_policy` does it while it reads files."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    layers = [(name, m) for name, m in model.named_modules() if type(m) is torch.nn.Linear]
    for name, layer in layers:
        if layer is model.get_output_embeddings():
            continue
        own = Linear4bit(1, 1, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        own.in_features, own.out_features = layer.in_features, layer.out_features
        weight, kind = layer.weight.detach(), {"quant_type": "nf4", "compress_statistics": True}
        own.weight = Params4bit(weight, requires_grad=False, module=own, **kind)  # pyright: ignore
        model.set_submodule(name, own.to(weight.device))  # this quantises
    model.is_loaded_in_4bit = True
    settle_nf4(model, torch.bfloat16)


def predicted(plan: Any, config: PretrainedConfig, args: argparse.Namespace) -> tuple[float, int]:
    """The share of blocks that are recomputed, and bytes of trainer and model without CUDA context.

    Raises:
        ConfigError: the run would be refused.
    """
    total = torch.cuda.get_device_properties(0).total_memory if args.device == "cuda" else 80 * GIB
    total -= int(args.server_gib * GIB)
    prompts = (args.prompt_tokens, args.prompt_tokens)
    (share, _), devices = choose_way(MemoryRequest(plan, config, None, prompts, [0], (), [total]))
    print("\n".join(describe(devices)), file=sys.stderr)
    check(devices)
    return share, sum(part.num_bytes for part in devices[0].trainer if part.name != "CUDA context")


def run_arm(args: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure one arm in this process."""
    config, device = SIZES[args.size], torch.device(args.device)
    sizes = {"data.problems_per_iteration": args.num_sequences // 8, "train.gradient_checkpointing": args.recompute}
    with tempfile.TemporaryDirectory() as scratch:
        plan = plan_of(
            Path(scratch), args, [f"{key}={value}" for key, value in sizes.items()] + [*ARMS[args.arm], *args.overrides]
        )
        try:
            recompute, expected = predicted(plan, copy.deepcopy(config), args)  # which changes it
        except ConfigError as error:
            return {"refused": str(error)}
        server = torch.empty(int(args.server_gib * GIB), dtype=torch.uint8, device=device)
        policy = make_policy(plan, config, device, recompute)
        started = time.perf_counter()
        policy.make_masters(offload="train.optimizer.offload=true" in ARMS[args.arm])
        ranks = Ranks(use_cpu=device.type == "cpu")
        updater = updater_of(plan, policy, Sharding(ranks))
        masters_s = time.perf_counter() - started
        batch = random_batch(args, args.num_sequences, config.get_text_config().vocab_size)
        updater.run(updater.passes.score(batch), iteration=0)
        more = {"predicted_gib": expected / GIB, "masters_s": masters_s, "recomputed": recompute}
        return measure(updater, batch, device, len(server)) | more


def measure(updater: Any, batch: Any, device: torch.device, server_bytes: int) -> dict[str, float]:
    """Peak, speed and the step's share of two updates."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    steps: list[float] = []
    publish = updater.passes.policy.masters.publish

    def before_step(*_: Any) -> None:
        wait()
        steps.append(-time.perf_counter())

    def published() -> None:
        publish()
        wait()
        steps[-1] += time.perf_counter()

    updater.optimizer.register_step_pre_hook(before_step)
    updater.passes.policy.masters.publish = published
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for iteration in range(1, 1 + ROUNDS):
        metrics = updater.run(updater.passes.score(batch), iteration=iteration)
        assert metrics["num_updates"] == 1.0, metrics
    wait()
    seconds = (time.perf_counter() - started) / ROUNDS
    found = {"tok_s": sum(batch.sequence_lengths) / seconds, "step_s": sum(steps) / ROUNDS, "update_s": seconds}
    found["host_gib"] = psutil.Process().memory_info().rss / GIB
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - server_bytes) / GIB
        found["card_gib"] = (total - free - server_bytes) / GIB
    return found


def run_arm_in_child(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--arm", arm], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        return {"error": f"exit code {done.returncode}"}
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{args.size} {arm}: {result}", flush=True)
    return result


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="0.6b", choices=list(SIZES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--arm", choices=list(ARMS), help="run one arm in this process and print its numbers as JSON")
    parser.add_argument(
        "--recompute", default="auto", choices=["true", "false", "auto"], help="train.gradient_checkpointing"
    )
    parser.add_argument("--server-gib", type=float, default=0.0)
    parser.add_argument("--num-sequences", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--completion-tokens", type=int, default=824)
    parser.add_argument("--tokens-per-microbatch", type=int, default=8192)
    parser.add_argument("--overrides", nargs="*", default=[], help="of run_grpo.py, for all arms")
    return parser.parse_args()


def main() -> None:
    expect_made_up_logprobs()
    args = parse_args()
    if args.arm is not None:
        print(json.dumps(run_arm(args)))
    else:
        arms = {arm: run_arm_in_child(args, arm) for arm in args.arms}
        ran = {arm: found for arm, found in arms.items() if "peak_gib" in found}
        errors = [abs(found["predicted_gib"] / found["peak_gib"] - 1) for found in ran.values()]
        measured = {f"{arm}_{name}": value for arm, found in ran.items() for name, value in found.items()}
        if not ran:
            print("nothing is measured without a GPU")
            return
        write_result(
            f"h100/model_sizes_{args.size}" + (f"_server_{args.server_gib:g}" if args.server_gib else ""),
            claim="The shape of Llama-3.1-8B trains in full on one GPU of 80 GB, below 76 GiB, as do the others, and "
            "the plan is within 10% of the peak.",
            targets=[Target("largest_peak_gib", "<=", 76), Target("largest_error", "<=", 0.10)],
            settings=vars(args),
            measured=measured
            | {
                "largest_peak_gib": max(found["peak_gib"] for found in ran.values()) + args.server_gib,
                "largest_error": max(errors),
            },
            details=arms,
        )


if __name__ == "__main__":
    main()
