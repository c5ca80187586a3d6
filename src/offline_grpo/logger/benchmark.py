"""What a run cost: sums over its iterations, told as the Atropos trainer's BENCHMARK SUMMARY and its `benchmark/*` in
Weights & Biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offline_grpo.types import Metrics

RULE = "=" * 70


@dataclass
class Benchmark:
    """Seconds and tokens of all iterations that were added. The time before the first iteration is not in it."""

    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each `time/NAME_s`."""
    num_syncs: int = 0
    num_completion_tokens: float = 0.0
    num_tokens_trained: float = 0.0
    card_gb: list[float] = field(default_factory=list)
    """Of the iterations that measured it: none on a CPU."""

    @classmethod
    def of(cls, records: Iterable[Metrics]) -> Benchmark:
        """Of the training metrics of a run."""
        found = cls()
        for metrics in records:
            found.add(metrics)
        return found

    def add(self, metrics: Metrics) -> None:
        """Count an iteration."""
        self.num_steps += 1
        for key, value in metrics.items():
            if key.startswith("time/") and not key.startswith("time/start"):
                self.seconds[key] = self.seconds.get(key, 0.0) + value
        self.num_syncs += metrics.get("time/sync_push_s", 0.0) > 0 and "sync/frozen" not in metrics
        self.num_completion_tokens += metrics.get("num_completion_tokens", 0.0)
        self.num_tokens_trained += metrics.get("num_tokens_trained", 0.0)
        if "perf/gpu_memory_card_gb" in metrics:
            self.card_gb.append(metrics["perf/gpu_memory_card_gb"])

    def total_s(self, name: str = "iteration") -> float:
        """Seconds of a phase, or of whole iterations."""
        return self.seconds.get(f"time/{name}_s", 0.0)

    def step_s(self, name: str = "iteration") -> float:
        """Its mean over the iterations; 0 without any."""
        return self.total_s(name) / max(self.num_steps, 1)

    def tokens_per_s(self, name: str) -> float:
        """Of sampling ("generate"), training ("train") or everything ("iteration"), over all seconds of it; 0 where it
        never ran.
        """
        tokens = self.num_tokens_trained if name == "train" else self.num_completion_tokens
        seconds = self.total_s("sampling" if name == "generate" else name)
        return tokens / seconds if seconds else 0.0

    @property
    def peak_gb(self) -> float | None:
        """The most that was in use of the trainer's GPU, whoever used it; None where it was not measured."""
        return max(self.card_gb, default=None)

    @property
    def mean_gb(self) -> float | None:
        """The mean of the iterations' peaks."""
        return sum(self.card_gb) / len(self.card_gb) if self.card_gb else None

    def summary(self, mode: str) -> list[str]:
        """The block of lines. Its labels are an interface: other people's scripts look for them."""
        gb = {
            name: "-" if value is None else f"{value:.2f} GB"
            for name, value in (("Peak", self.peak_gb), ("Avg", self.mean_gb))
        }
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
            **{f"    {name} GPU memory": text for name, text in gb.items()},
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
        if self.peak_gb is not None and self.mean_gb is not None:
            found |= {"benchmark/peak_gpu_memory_gb": self.peak_gb, "benchmark/avg_gpu_memory_gb": self.mean_gb}
        return found


def mode_of(config: Mapping[str, Any]) -> str:
    """How a run moved its weights, by the module of its strategy: `shared_vllm` for
    `offline_grpo.weight_sync.shared_vllm.SharedVllm`.
    """
    return str(config["weight_sync"]["_target_"]).split(".")[-2]
