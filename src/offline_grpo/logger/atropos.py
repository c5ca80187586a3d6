"""Names, lines and the BENCHMARK SUMMARY of the Atropos example trainer, which scripts of its users look for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from offline_grpo.settings import one_of
from offline_grpo.types import Metrics

Names = Annotated[str, one_of("default", "atropos")]
_SAME = (
    *("alignment/diff_mean", "alignment/diff_abs_mean", "alignment/diff_max", "logprobs/inference_mean"),
    *("logprobs/inference_std", "logprobs/training_mean", "logprobs/training_std"),
)
NAMES = {
    "loss_total": ("train/loss",),
    "grad_norm": ("train/grad_norm",),
    "lr": ("train/lr", "train/learning_rate"),  # of its later and its earlier versions
    "pos_logp": ("train/pos_logp",),
    "neg_logp": ("train/neg_logp",),
    "time/train_s": ("train/step_time",),
    "time/sync_s": ("train/sync_time",),
    "time/generate_s": ("train/data_fetch_time",),
    "perf/gpu_memory_gb": ("train/gpu_memory_gb",),
    "perf/gpu_memory_reserved_gb": ("train/gpu_memory_reserved_gb",),
    "ratio_mean": ("grpo/mean_ratio",),
    "clip_frac": ("grpo/clipped_fraction",),
    "sync/version": ("bridge/update_count",),
    "num_trainable_parameters": ("lora/trainable_params",),
    **{key: (key,) for key in _SAME},
}
"""Training metric -> its names there. What is not here keeps its own."""
PRINTED = (
    (
        ("Loss: {:.6f}", "loss_total"),
        ("Grad norm: {:.4f}", "grad_norm"),
        ("Step time: {:.2f}s", "time/train_s"),
        ("Sync time: {:.2f}s", "time/sync_s"),
    ),
    (("GRPO: ratio={:.3f}", "ratio_mean"), ("clipped={:.1%}", "clip_frac")),
    (("Advantages: +{:.0f} / -{:.0f}", "num_advantages_positive", "num_advantages_negative"),),
    (("LogP: pos={:.3f}", "pos_logp"), ("neg={:.3f}", "neg_logp")),
)
"""Lines of parts: a form, and the metrics in it."""
SECTIONS = sorted({name.partition("/")[0] for names in NAMES.values() for name in names})
RULE = "=" * 70


def renamed(metrics: Metrics) -> tuple[dict[str, float], dict[str, float]]:
    """Training metrics by their names there, and those that have none."""
    found = {name: value for key, value in metrics.items() for name in NAMES.get(key, ())}
    return found, {key: value for key, value in metrics.items() if key not in NAMES}


def console_lines(at: str, metrics: Metrics) -> list[str]:
    """What that trainer prints after a step; a part that was not measured is left out."""
    lines = [f"Step {at}"]
    for parts in PRINTED:
        texts = [form.format(*map(metrics.get, keys)) for form, *keys in parts if metrics.keys() >= {*keys}]
        lines += [f"  {', '.join(texts)}"] if texts else []
    return lines


def mode_of(config: Mapping[str, Any]) -> str:
    """How a run moved its weights, by the module of its strategy, such as `shared_vllm`."""
    return str(config["weight_sync"]["_target_"]).split(".")[-2]


@dataclass
class Benchmark:
    """What the iterations of a run cost, from their training metrics, without the time before the first one."""

    records: list[Metrics] = field(default_factory=list)

    @property
    def num_syncs(self) -> int:
        return sum(each.get("time/sync_push_s", 0.0) > 0 and "sync/frozen" not in each for each in self.records)

    def total(self, key: str) -> float:
        return sum(each.get(key, 0.0) for each in self.records)

    def step_s(self, name: str = "iteration") -> float:
        """Mean seconds of a phase, or of whole iterations, over the iterations; 0 without any."""
        return self.total(f"time/{name}_s") / max(len(self.records), 1)

    def sync_s(self) -> float:
        """Mean of all syncs over those that pushed."""
        return self.total("time/sync_s") / max(self.num_syncs, 1)

    def tokens_per_s(self, name: str) -> float:
        """Of sampling ("generate"), training ("train") or everything ("iteration"); 0 where it never ran."""
        tokens = self.total("num_tokens_trained" if name == "train" else "num_completion_tokens")
        seconds = self.total(f"time/{'sampling' if name == 'generate' else name}_s")
        return tokens / seconds if seconds else 0.0

    @property
    def gpu_gb(self) -> tuple[float, float] | None:
        """The highest and the mean of the peaks of the trainer's GPU, all processes together; None on a CPU."""
        key = "perf/gpu_memory_card_gb"
        peaks = [each[key] for each in self.records if key in each]
        return (max(peaks), sum(peaks) / len(peaks)) if peaks else None

    def summary(self, mode: str) -> list[str]:
        """The block of lines."""
        peak, mean = (f"{gb:.2f} GB" for gb in self.gpu_gb) if self.gpu_gb else ("-", "-")
        phases = ("iteration", "train", "sync", "generate")
        total_s, train_s, sync_s, fetch_s = (self.total(f"time/{phase}_s") for phase in phases)
        rows = {
            "  Total training time": f"{total_s:.2f}s ({total_s / 60:.2f} min)",
            "  Total steps": str(len(self.records)),
            "  TIMING BREAKDOWN": "",
            "    Avg step time": f"{self.step_s('train'):.2f}s",
            "    Total step time": f"{train_s:.2f}s",
            "    Avg sync time": f"{self.sync_s():.2f}s (x{self.num_syncs} syncs)",
            "    Total sync time": f"{sync_s:.2f}s",
            "    Avg data fetch time": f"{self.step_s('generate'):.2f}s",
            "    Total data fetch time": f"{fetch_s:.2f}s",
            "  MEMORY": "",
            "    Peak GPU memory": peak,
            "    Avg GPU memory": mean,
        }
        lines = [(f"{label}:".ljust(27) + text).rstrip() for label, text in rows.items()]
        return [RULE, f"BENCHMARK SUMMARY ({mode})", RULE, *lines, RULE]

    def as_metrics(self) -> dict[str, float]:
        """`benchmark/NAME` -> number, as that trainer logs them."""
        total_s = self.total("time/iteration_s")
        found = {
            "benchmark/total_time_seconds": total_s,
            "benchmark/total_time_minutes": total_s / 60,
            "benchmark/total_steps": float(len(self.records)),
            "benchmark/avg_step_time_seconds": self.step_s("train"),
        }
        names = ("benchmark/peak_gpu_memory_gb", "benchmark/avg_gpu_memory_gb")
        return found | dict(zip(names, self.gpu_gb or (), strict=False))
