"""The training metrics as the Atropos example trainer calls them, in Weights & Biases and on the console."""

from __future__ import annotations

from offline_grpo.errors import require
from offline_grpo.types import Metrics

CHOICES = ("default", "atropos")
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
    **{f"alignment/diff_{name}": (f"alignment/diff_{name}",) for name in ("mean", "abs_mean", "max")},
    **{
        f"logprobs/{side}_{name}": (f"logprobs/{side}_{name}",)
        for side in ("inference", "training")
        for name in ("mean", "std")
    },
    "sync/version": ("bridge/update_count",),
    "num_trainable_parameters": ("lora/trainable_params",),
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


def check_choice(key: str, value: str) -> None:
    """Raise ConfigError unless the setting `key` names the names of a metric."""
    require(value in CHOICES, key, value, f"must be one of {', '.join(CHOICES)}")


def renamed(metrics: Metrics) -> tuple[dict[str, float], dict[str, float]]:
    """Training metrics by their names there, and those that have none."""
    found = {name: value for key, value in metrics.items() for name in NAMES.get(key, ())}
    return found, {key: value for key, value in metrics.items() if key not in NAMES}


def console_lines(at: str, metrics: Metrics) -> list[str]:
    """What that trainer prints after a step; a part that was not measured is left out."""
    lines = (
        (form.format(*(metrics[key] for key in keys)) for form, *keys in line if metrics.keys() >= set(keys))
        for line in PRINTED
    )
    return [f"Step {at}", *(f"  {text}" for parts in lines if (text := ", ".join(parts)))]
