"""What a run cost, as the Atropos trainer's BENCHMARK SUMMARY and its `benchmark/*` in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offline_grpo.types import Metrics

RULE = "=" * 70


@dataclass
class Benchmark:
    """The training metrics of a run's iterations. The time before the first iteration does not count."""

    records: list[Metrics] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.records)

    @property
    def num_syncs(self) -> int:
        return sum(each.get("time/sync_push_s", 0.0) > 0 and "sync/frozen" not in each for each in self.records)

    def total(self, key: str) -> float:
        """The sum of a metric."""
        return sum(each.get(key, 0.0) for each in self.records)

    def total_s(self, name: str = "iteration") -> float:
        """Seconds of a phase, or of whole iterations."""
        return self.total(f"time/{name}_s")

    def step_s(self, name: str = "iteration") -> float:
        """Its mean over the iterations; 0 without any."""
        return self.total_s(name) / max(self.num_steps, 1)

    def tokens_per_s(self, name: str) -> float:
        """Of sampling ("generate"), training ("train") or everything ("iteration"); 0 where it never ran."""
        tokens = self.total("num_tokens_trained" if name == "train" else "num_completion_tokens")
        seconds = self.total_s("sampling" if name == "generate" else name)
        return tokens / seconds if seconds else 0.0

    @property
    def gpu_gb(self) -> tuple[float, float] | None:
        """The highest and the mean of the peaks of the trainer's GPU, all processes together; None on a CPU."""
        key = "perf/gpu_memory_card_gb"
        peaks = [each[key] for each in self.records if key in each]
        return (max(peaks), sum(peaks) / len(peaks)) if peaks else None

    def summary(self, mode: str) -> list[str]:
        """The block of lines. Its labels are an interface: other people's scripts look for them."""
        peak, mean = (f"{gb:.2f} GB" for gb in self.gpu_gb) if self.gpu_gb else ("-", "-")
        rows = {
            "  Total training time": f"{self.total_s():.2f}s ({self.total_s() / 60:.2f} min)",
            "  Total steps": str(self.num_steps),
            "  TIMING BREAKDOWN": "",
            "    Avg step time": f"{self.step_s('train'):.2f}s",
            "    Total step time": f"{self.total_s('train'):.2f}s",
            "    Avg sync time": f"{self.total_s('sync') / max(self.num_syncs, 1):.2f}s (x{self.num_syncs} syncs)",
            "    Total sync time": f"{self.total_s('sync'):.2f}s",
            "    Avg data fetch time": f"{self.step_s('generate'):.2f}s",
            "    Total data fetch time": f"{self.total_s('generate'):.2f}s",
            "  MEMORY": "",
            "    Peak GPU memory": peak,
            "    Avg GPU memory": mean,
        }
        lines = [f"{label}:".ljust(27) + text for label, text in rows.items()]
        return [RULE, f"BENCHMARK SUMMARY ({mode})", RULE, *(line.rstrip() for line in lines), RULE]

    def as_metrics(self) -> dict[str, float]:
        """`benchmark/NAME` -> number, as the Atropos trainer calls them."""
        found = {
            "benchmark/total_time_seconds": self.total_s(),
            "benchmark/total_time_minutes": self.total_s() / 60,
            "benchmark/total_steps": float(self.num_steps),
            "benchmark/avg_step_time_seconds": self.step_s("train"),
        }
        names = ("benchmark/peak_gpu_memory_gb", "benchmark/avg_gpu_memory_gb")
        return found | (dict(zip(names, self.gpu_gb, strict=True)) if self.gpu_gb else {})


def mode_of(config: Mapping[str, Any]) -> str:
    """How a run moved its weights, by the module of its strategy, such as `shared_vllm`."""
    return str(config["weight_sync"]["_target_"]).split(".")[-2]
