"""The training metrics as the Atropos example trainer calls them, in Weights & Biases and on the console."""

from __future__ import annotations

from offline_grpo.errors import ConfigError
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
SECTIONS = sorted({name.partition("/")[0] for names in NAMES.values() for name in names})


def check_choice(key: str, value: str) -> None:
    """Raise ConfigError unless the setting `key` names the names of a metric."""
    if value not in CHOICES:
        raise ConfigError(f"{key}={value}: must be one of {', '.join(CHOICES)}")


def renamed(metrics: Metrics) -> tuple[dict[str, float], dict[str, float]]:
    """Training metrics by their names there, and those that have none."""
    found = {name: value for key, value in metrics.items() for name in NAMES.get(key, ())}
    return found, {key: value for key, value in metrics.items() if key not in NAMES}


def console_lines(at: str, metrics: Metrics) -> list[str]:
    """What that trainer prints after a step; a part that was not measured is left out."""
    parts = (
        (
            "Loss: {loss_total:.6f}",
            "Grad norm: {grad_norm:.4f}",
            "Step time: {time/train_s:.2f}s",
            "Sync time: {time/sync_s:.2f}s",
        ),
        ("GRPO: ratio={ratio_mean:.3f}", "clipped={clip_frac:.1%}"),
        ("Advantages: +{num_advantages_positive:.0f} / -{num_advantages_negative:.0f}",),
        ("LogP: pos={pos_logp:.3f}", "neg={neg_logp:.3f}"),
    )
    lines = [", ".join(written for part in line if (written := _written(part, metrics))) for line in parts]
    return [f"Step {at}", *(f"  {line}" for line in lines if line)]


def _written(part: str, metrics: Metrics) -> str:
    try:
        return part.format_map(metrics)
    except KeyError:
        return ""
