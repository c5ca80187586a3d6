"""`python -m offline_grpo.model_info MODEL`: its blocks and weights, presets for training parts of it, and which GPUs
it fits.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo import hub
from offline_grpo.commands import cli
from offline_grpo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

GPUS_GB = (24, 40, 80, 141)
USABLE = 0.975
"""GiB that torch finds on a GPU, per GB of its name: 23.5 of 24, 79.1 of 80."""
LORA_RANK = 16
PROMPT_TOKENS, COMPLETION_TOKENS, MICROBATCH_TOKENS = 512, 1024, 8192
COMMON = (
    "generation=vllm_server",
    "train.precision=bf16",
    "train.gradient_checkpointing=true",
    "train.kl_coef=0",
    "train.batch_size=null",
    f"train.tokens_per_microbatch={MICROBATCH_TOKENS}",
    f"generation.max_new_tokens={COMPLETION_TOKENS}",
    "eval.enabled=false",
)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.model_info", description=__doc__)
    text = "checkpoint, run folder, model folder or Hub id; no weights are read"
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument("--json", action="store_true", help="as JSON")
    cli.add_trust_option(parser)
    options = parser.parse_args(arguments)

    print("offline-grpo: loading ...", file=sys.stderr, flush=True)
    hub.need_model(options.model, "MODEL")  # before imports that take seconds
    info, fits = look_at(options.model, trust=options.trust_remote_code)
    if options.json:
        print(json.dumps(info | {"fits": list(fits)}, indent=2))
        return
    for line in (*about(info), *HEAD):
        print(line, flush=True)
    for fit in fits:  # each prediction takes seconds
        rooms = "".join(f"{'-' if room is None else f'{room:.2f}':>9}" for room in fit["room_frac"].values())
        print(f"  {fit['name']:<20} {fit['trainer_gib']:6.1f} GiB{rooms}", flush=True)
    print(FOOT)


def look_at(name: str, *, trust: bool) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """What its config.json says of a model, and the ways to train it (see `_fits`). Sizes of files are in MB, 10^6
    bytes. Raises ConfigError if there is none, or none that can be trained.
    """
    import torch

    from offline_grpo.checkpoint.pretrained import find_model
    from offline_grpo.model.adapters import with_lora
    from offline_grpo.model.layers import named_blocks
    from offline_grpo.model.load import build_on_meta, context_length, read_model_config
    from offline_grpo.settings import LoraConfig

    # Its blocks and weights, counted on a model without memory.
    source = find_model(name, trust_remote_code=trust)
    config = read_model_config(source.weights, "MODEL", trust_remote_code=trust)
    model: Any = build_on_meta(config, trust_remote_code=trust)
    num_blocks, num_weights = config.get_text_config().num_hidden_layers, _count(model.parameters())
    path, blocks = named_blocks(model)
    of_blocks = [_count(block.parameters()) for block in blocks]
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight

    # Parts of it that may be trained alone: an adapter on all linear layers, or the last blocks.
    lora = LoraConfig(LORA_RANK, 2 * LORA_RANK, 0.0, ["all-linear"], None)
    with torch.device("meta"):
        adapted = with_lora(build_on_meta(config, trust_remote_code=trust), lora, adapter=None)
    adapters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    presets = []
    for label, count in (("last 25%", ceil(num_blocks / 4)), ("last 50%", ceil(num_blocks / 2)), ("last 12", 12)):
        if count <= num_blocks:
            first = num_blocks - count
            indices = f"{first}-{num_blocks - 1}" if count > 1 else str(first)
            override = f"train.train_layer_indices={indices}"
            presets.append({"name": label, "override": override, "num_trained": sum(of_blocks[first:])})

    info = {
        "name": name,
        "architecture": type(model).__name__,
        "num_blocks": num_blocks,
        "blocks": path,  # their name in the model
        "num_weights": num_weights,
        "num_per_block": (min(of_blocks), max(of_blocks)),
        "num_of_embeddings": _count([embeddings] if embeddings is output else [embeddings, output]),
        "is_tied": embeddings is output,
        "context": context_length(config),
        "presets": presets,
        "lora_targets": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters}),
        "adapter_mb": 2 * _count(adapters.values()) / 1e6,
        "model_mb": 2 * num_weights / 1e6,
    }
    return info, _fits(source.weights, config, presets[0]["override"], trust)


def _count(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _fits(weights: str, config: PretrainedConfig, quarter: str, trust: bool) -> Iterator[dict[str, Any]]:
    """Ways to train, by the memory plan of a run with one GPU for the longest sequences. `room_frac`: the largest
    `engine.args.gpu_memory_utilization` beside the trainer on a GPU of each size; None: does not fit.
    """
    from offline_grpo.config import compose as conf
    from offline_grpo.config.parts import make_plan
    from offline_grpo.start.memory import DEFAULT_SHARE, GIB, MemoryRequest, predict, room_for_server

    conf.register()
    full = "weight_sync=shared_vllm"
    adapted = ("weight_sync=lora_hotswap", "model/lora=default", f"model.lora.r={LORA_RANK}")
    ways = {
        "full, AdamW": (full, "train/optimizer=adamw"),
        "full, AdamW offload": (full, "train/optimizer=adamw", "train.optimizer.offload=true"),
        "full, 8-bit AdamW": (full, "train/optimizer=adamw_8bit"),
        "full, Adafactor": (full, "train/optimizer=adafactor"),
        "last 25%, AdamW": (full, quarter),
        f"LoRA r={LORA_RANK}, AdamW": adapted,
        f"NF4 LoRA r={LORA_RANK}, AdamW": (*adapted, "model.quantization=nf4"),
    }
    train_id = f"model.train_id={conf.quoted(Path(weights))}"
    model = ("model=hf", train_id, f"model.trust_remote_code={str(trust).lower()}")
    for name, overrides in ways.items():
        plan = make_plan(conf.typed(conf.composed([*model, *COMMON, *overrides])))
        prompts = (PROMPT_TOKENS, PROMPT_TOKENS)
        try:
            request = MemoryRequest(plan, config, None, prompts, [0], [0], [GIB])
        except ConfigError:  # there is no such way: experts in 4 bits
            continue
        device, *_ = predict(request, recompute=1.0)
        rooms = {gb: room_for_server(device, total_bytes=int(gb * USABLE * GIB)) for gb in GPUS_GB}
        capped = {gb: None if room is None else min(room, DEFAULT_SHARE) for gb, room in rooms.items()}
        trainer_gib = sum(part.num_bytes for part in device.trainer) / GIB
        yield {"name": name, "overrides": overrides, "trainer_gib": trainer_gib, "room_frac": capped}


def about(info: dict[str, Any]) -> Iterator[str]:
    """Lines of at most 80 columns."""
    fewest, most = info["num_per_block"]
    each = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    last = info["num_blocks"] - 1
    sharing = "shared by input and output" if info["is_tied"] else "input and output"
    yield f"{info['name']}: {info['architecture']}"
    yield f"  weights     {info['num_weights']:,}, {info['model_mb']:,.0f} MB in bf16"
    yield f"  blocks      {info['num_blocks']} ({info['blocks']}.0 to {last}), {each} weights each"
    yield f"  embeddings  {info['num_of_embeddings']:,} weights, {sharing}"
    if info["context"] is not None:
        yield f"  context     {info['context']:,} tokens"
    yield f"\nTrain some blocks alone: indices 0 to {last}, such as"
    for preset in info["presets"]:
        share = preset["num_trained"] / info["num_weights"]
        yield f"  {preset['override']:<36} {preset['name']:<10} {share:4.0%} of the weights"
    yield f"\nTrain an adapter: model/lora=default, rank {LORA_RANK}"
    yield f"  {info['adapter_mb']:,.1f} MB beside the model's {info['model_mb']:,.0f} MB, on"
    yield textwrap.fill(", ".join(info["lora_targets"]), 78, initial_indent="  ", subsequent_indent="  ") + "\n"


HEAD = (
    "On one GPU with its vLLM server: the largest engine.args.gpu_memory_utilization",
    f"  {'':<20} {'trainer':>10}" + "".join(f"{f'{gb} GB':>9}" for gb in GPUS_GB),
)
FOOT = """  -: does not fit. Full training with weight_sync=shared_vllm, LoRA with
  lora_hotswap; bf16, gradient checkpointing, no KL term, prompts of 512 and
  completions of 1024 tokens, microbatches of 8192 tokens."""


if __name__ == "__main__":
    cli.run_command(run)
