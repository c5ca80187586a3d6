"""What an iteration cost: seconds, tokens per second and GPU memory. Equal runs differ in these metrics alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offline_grpo.types import Metrics


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
    """The most memory that this process has held on its GPU since the last call, in GB (1e9 bytes); empty without a
    GPU.

    Allocated is what tensors took, reserved what torch took from the device to put them into. What a server takes is
    not in them.

    Args:
        card_bytes: the most that was seen in use on that GPU, a server's share included.
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
