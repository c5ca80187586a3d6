"""The cost of an iteration: seconds, tokens per second, GPU memory, and model FLOPs utilisation: the arithmetic that an
update needs, over what the GPU could have done in that time (Chowdhery et al., arXiv 2204.02311, appendix B). Equal
runs differ in these metrics alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from offline_grpo.model.layers import layer_configs, text_parameters
from offline_grpo.model.nf4 import num_weights
from offline_grpo.types import Metrics

PEAK_FLOPS = {
    "B200": 2250e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "A10G": 70e12,
    "L4": 121e12,
}
"""Of the makers' data sheets, dense, in bfloat16, by a part of the GPU's name; PCIe and SXM cards count alike."""


def time_metrics(seconds: Mapping[str, float], metrics: Metrics) -> dict[str, float]:
    """Seconds of each phase, and throughput: of sampling and of training over their own time, and of the whole
    iteration.

    Args:
        seconds: of each phase that ran in the iteration, by its name.
        metrics: with the numbers of tokens that were sampled and trained on. A source that samples at other times
            than in the phase "generate" says in how many seconds by `time/sampling_s`, which is 0 where nothing was
            sampled.
    """
    found = {f"time/{name}_s": value for name, value in seconds.items()}
    found["time/sampling_s"] = sampling_s = metrics.get("time/sampling_s", seconds["generate"])
    found["time/iteration_s"] = total_s = sum(seconds.values())
    found["perf/tokens_per_s"] = metrics["num_completion_tokens"] / total_s
    if sampling_s > 0:
        found["perf/generate_tokens_per_s"] = metrics["num_completion_tokens"] / sampling_s
    if "num_tokens_trained" in metrics:
        found["perf/train_tokens_per_s"] = metrics["num_tokens_trained"] / seconds["train"]
    return found


def card_bytes(device: torch.device) -> int:
    """What all processes together hold on a GPU now, a server's included; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def gpu_memory(device: torch.device, card_bytes: int) -> dict[str, float]:
    """The most memory that this process has held on its GPU since the last call, in GB (1e9 bytes): in tensors, and
    reserved for them; and `card_bytes`, the most that was in use there, a server's share included. Empty without a GPU.
    """
    if device.type != "cuda":
        return {}
    peaks = {
        "perf/gpu_memory_card_gb": card_bytes / 1e9,
        "perf/gpu_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9,
        "perf/gpu_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def update_flops(model: PreTrainedModel, sequence_lengths: Sequence[int]) -> float | None:
    """Operations of a forward and a backward pass of text over these sequences, prompts included; None where
    config.json does not say how large the heads are.

    A weight of a matrix takes two per token in the forward pass and two for the gradient of its input; two more, if it
    is trained, for its own. Of the embeddings only the output head counts. Of the experts of a layer those count that a
    token goes to. Attention takes 12 x layers x heads x head size x L^2 / 2 for a sequence of L tokens: causal, over
    everything before. What is computed again, because it was not kept, does not count.
    """
    config: Any = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((number for name in names if (number := getattr(config, name, None))), None)
    active_experts = getattr(config, "num_experts_per_tok", 1) / num_experts if num_experts else 1.0
    per_token = 0.0
    for name, parameter in text_parameters(model).items():
        if parameter.dim() < 2 or (parameter is embedding.weight and not is_tied):
            continue
        active = active_experts if ".experts." in name else 1.0
        per_token += active * num_weights(parameter) * (6 if parameter.requires_grad else 4)
    per_square = 0.0
    try:
        for layer in layer_configs(config):
            num_heads = getattr(layer, "num_attention_heads", 0)  # Mamba has none
            head_size = getattr(layer, "head_dim", None) or (layer.hidden_size // num_heads if num_heads else 0)
            per_square += 12 * num_heads * head_size / 2
    except (AttributeError, RuntimeError):  # the latter is what transformers raises where layers differ
        return None
    return per_token * sum(sequence_lengths) + per_square * sum(length**2 for length in sequence_lengths)


def peak_flops(device: torch.device) -> float | None:
    """Operations per second of a GPU; None for one that is not in the table, and for a CPU."""
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)


def utilisation(flops: float | None, seconds: float, device: torch.device, num_devices: int) -> dict[str, float]:
    """The share of the GPUs' peak that `flops` in so many `seconds` are; empty where either is not known."""
    peak = peak_flops(device)
    return {} if peak is None or flops is None else {"perf/mfu": flops / (seconds * peak * num_devices)}
