"""Seconds of an update of LoRA adapters against one of all weights, on one GPU, and the kernels that they spend it in.

    # Qwen3-0.6B's shape, random weights, bf16, rank 16 on all linear layers; about four minutes
    python benchmarks/lora_speed.py
    python benchmarks/lora_speed.py --small     # a tiny model on the CPU; says nothing about speed

256 completions of 512 tokens after prompts of 40, in microbatches of 16384 tokens, nothing recomputed: the update of
the iteration that iteration_gpu.py measures. Blocks are compiled, layout and loss head are those that a run chooses.
All arms have fp32 masters and AdamW. Adapters are added to their layers as runs do it (`ours`), with the scale folded
into B and one product for layers that share their input; without the latter (`folded`); and as peft does it. First, all
must have peft's logprobs and gradients. Then the arms alternate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import Target, alternate, expect_made_up_logprobs, wait_for_device, write_result
from our_trainer import make_updater
from peft.tuners.lora import Linear
from sampling import profiled
from shapes import SIZES
from train_speed import make_batch
from transformers import AutoModelForCausalLM

from offline_grpo.model.adapters import with_lora
from offline_grpo.model.layouts import layouts_for
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.lora_layer import FoldedLinear
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.scoring import Scoring
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.settings import LoraConfig
from offline_grpo.train.update import Updater

RANK = 16
GATE = 0.01  # nats on average, and of the gradient's norm: the same model, rounded at other places


ARMS = ("full", "peft", "folded", "ours")


def make_arm(arm: str, shape: str, device: torch.device, *, tokens_per_microbatch: int) -> Updater:
    precision = "bf16" if device.type == "cuda" else "fp32"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(SIZES[shape], dtype=dtype)
    if arm != "full":
        model = with_lora(model, LoraConfig(RANK, 2 * RANK, 0.0, ["all-linear"], None), adapter=None)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.02)  # zeros, as new ones have, have no gradient for A
    scoring = Scoring(model, layouts_for(None, device, dtype)[0], TiledHead(tile_width=None, kept_gib=3.0))
    settle_layout(scoring, None, device)
    undo(model, arm)
    settle_compile(scoring, "auto", device)
    policy = Policy(scoring, build_char_tokenizer(4096))
    settings: dict[str, Any] = {
        "precision": precision,
        "tokens_per_microbatch": tokens_per_microbatch,
        "max_new_tokens": 512,
    }
    return make_updater(policy, **settings, lr=1e-6, clip_high=0.28, checkpointing=False)


def undo(model: torch.nn.Module, arm: str) -> None:
    """Take back what runs do to adapted layers, and this arm does not."""
    for layer in (module for module in model.modules() if isinstance(module, FoldedLinear)):
        if arm != "ours":
            layer.shared = None
        if arm == "peft":
            layer.__class__ = Linear  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--arms", default=",".join(ARMS), help="full, peft and ours must be among them")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="h100/lora_speed")
    args = parser.parse_args()
    if args.small:
        args.tokens_per_microbatch = 512
    expect_made_up_logprobs()
    device = torch.device("cpu" if args.small else "cuda")
    shape, completions, tokens = ("tiny", 16, 24) if args.small else ("0.6b", 256, 512)
    batch = make_batch([tokens] * completions, prompt=40, vocab_size=SIZES[shape].vocab_size)
    arm_names = args.arms.split(",")
    updaters = {
        name: make_arm(name, shape, device, tokens_per_microbatch=args.tokens_per_microbatch) for name in arm_names
    }
    part = batch.select(range(8)).to(device)
    logprobs = {name: updater.policy.logprobs(part) for name, updater in updaters.items() if name != "full"}
    difference = max((found - logprobs["peft"]).abs().mean().item() for found in logprobs.values())
    assert difference <= GATE, f"ways to add an adapter differ by {difference} nats"
    norms = {name: updater.run(batch, iteration=0)["grad_norm"] for name, updater in updaters.items()}
    assert all(abs(norms[name] / norms["peft"] - 1) <= GATE for name in logprobs), f"and by their gradients: {norms}"
    arms: dict[str, Callable[[], Any]] = {
        name: lambda updater=updater: update(updater, batch) for name, updater in updaters.items()
    }
    timings = alternate(arms, rounds=args.rounds, warmup=1)
    measured = {f"{name}_s": timings.median_s(name) for name in arms} | {
        f"{name}_vs_full": timings.ratio(name, "full") for name in logprobs
    }
    costliest = {}
    for name, arm in arms.items():
        found, costliest[name] = profiled(arm, 1)
        measured |= {f"{name}_{key.removesuffix('_per_step')}": value for key, value in found.items()}
        print(name, *costliest[name], sep="\n", flush=True)
    write_result(
        args.name,
        claim="An update of LoRA adapters takes no longer than one of all weights",
        targets=[Target("ours_vs_full", "<=", 1.0)],
        settings=vars(args) | {"rank": RANK, "shape": shape},
        measured=measured | {"difference_nats": difference},
        details={
            "timings": timings.summary("full"),
            "grad_norms": norms,
            "costliest": costliest,
            "num_tokens": len(batch.token_ids),
        },
    )


def update(updater: Updater, batch: Any) -> None:
    updater.run(batch, iteration=0)
    wait_for_device()


if __name__ == "__main__":
    main()
