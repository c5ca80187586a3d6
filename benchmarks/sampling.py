"""Milliseconds per decoding step of sampling in process, and where they go.

    python benchmarks/sampling.py            # one GPU, Qwen2.5-0.5B's shape with random weights, bf16: about one minute
    python benchmarks/sampling.py --small    # a tiny model on the CPU

Arms, on one model, `--rows` sequences of `--tokens` tokens after a prompt of 40 that groups of 8 share:
    client     TransformersClient, as a run with generation=transformers samples
    forward    the model's decoder and head alone, one token at a time with the same kind of cache, the most probable
               token each time

First the client draws twice, and must draw the same tokens. Then the arms alternate. Of one more call of each, torch's
profiler counts the kernels per step (operators on a CPU) and adds up their time: what is left of a step is Python and
waiting.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from common import Target, alternate, complete_in_order, wait_for_device, write_result
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from weight_sync import SHAPES

from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import SamplingParams, SamplingRequest

GROUP = 8
PROMPT_TOKENS = 40


def make_model(shape: str, device: str) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen2Config(**SHAPES[shape], num_key_value_heads=2, tie_word_embeddings=True)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = None  # every sequence goes on to the end
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


@torch.no_grad()
def forward_alone(model: Any, rows: int, tokens: int) -> None:
    cache = DynamicCache(config=model.config)
    token_ids = torch.full((rows, PROMPT_TOKENS), 5, device=model.device)
    for _ in range(tokens):
        logits = model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # [B, 1, V]
        token_ids = logits[:, -1].argmax(-1, keepdim=True)


def profiled(arm: Callable[[], object], steps: int) -> tuple[dict[str, float], list[str]]:
    """Kernels and their milliseconds per step, and the costliest by name."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        arm()
        wait_for_device()
    events = found.key_averages()
    times = {
        event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / steps
        for event in events
    }
    counts = sum(event.count for event in events if times[event.key] > 0) / steps
    costliest = sorted(times, key=lambda name: -times[name])[:10]
    return {"kernels_per_step": counts, "kernel_ms_per_step": sum(times.values())}, [
        f"{times[name]:.3f} ms {name}" for name in costliest
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", default="sampling")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.rows, arguments.tokens = 16, 16
    rows, tokens = arguments.rows, arguments.tokens
    model = make_model("small" if arguments.small else "qwen2_5_0_5b", "cpu" if arguments.small else "cuda")
    tokenizer: Any = build_char_tokenizer(PROMPT_TOKENS + tokens)
    tokenizer.eos_token = None
    client = TransformersClient(model, tokenizer, batch_size=rows)
    draw = random.Random(0)
    asked = [
        SamplingRequest(tuple(draw.randint(3, 80) for _ in range(PROMPT_TOKENS)), GROUP, 1000 * i)
        for i in range(rows // GROUP)
    ]
    sampling = SamplingParams(max_new_tokens=tokens)
    arms: dict[str, Callable[[], Any]] = {
        "client": lambda: complete_in_order(client, asked, sampling),
        "forward": lambda: forward_alone(model, rows, tokens),
    }
    drawn = arms["client"]()
    assert drawn == arms["client"](), "the same seeds draw other tokens"
    assert all(len(completion.token_ids) == tokens for group in drawn for completion in group)
    timings = alternate(arms, rounds=arguments.rounds)
    measured = {f"{name}_ms_per_step": 1000 * timings.median_s(name) / tokens for name in arms}
    measured["client_tokens_per_s"] = rows * tokens / timings.median_s("client")
    costliest = {}
    for name, arm in arms.items():
        found, costliest[name] = profiled(arm, tokens)
        measured |= {f"{name}_{key}": value for key, value in found.items()}
    write_result(
        arguments.out,
        claim="A decoding step of sampling in process takes at most 12 ms for Qwen2.5-0.5B's shape on an H100",
        targets=[Target("client_ms_per_step", "<=", 12)],
        settings=vars(arguments),
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={"timings": timings.summary("forward"), "costliest": costliest},
    )


if __name__ == "__main__":
    main()
