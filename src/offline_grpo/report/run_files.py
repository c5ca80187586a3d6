"""Reads what Hydra stored about a run in its folder: the choices and values that it was composed of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from offline_grpo.redaction import flat, redacted, redacted_text

WITHOUT_EFFECT = ("resume", "logger", "samples", "num_threads", "cache_dir")
"""Top-level keys that change nothing that is learnt; they do not count when configurations are compared."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file."""
    return yaml.safe_load(path.read_text())


def overrides_of(run_dir: Path) -> dict[str, str]:
    """`["train.lr=1e-6", "task=sat"]` -> {"train.lr": "1e-6", "task": "sat"}; `~key` deletes and has no value."""
    pairs = (
        redacted_text(str(override)).partition("=")
        for override in read_yaml(run_dir / ".hydra" / "overrides.yaml") or []
    )
    return {key: value for key, _, value in pairs if key != "resume"}


def settings_of(run_dir: Path) -> dict[str, str]:
    """The stored configuration by dotted keys, interpolations as they are; without keys that are null."""
    stored = flat(redacted(read_yaml(run_dir / ".hydra" / "config.yaml")))
    return {key: str(value) for key, value in stored.items() if value is not None}


def choices_of(run_dir: Path) -> dict[str, str]:
    """Group -> option, without Hydra's own."""
    choices = read_yaml(run_dir / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]
    return {str(group): str(option) for group, option in choices.items() if not str(group).startswith("hydra/")}


def starts_of(run_dir: Path) -> list[dict[str, Any]]:
    """What `history/resume.py` records of each start, in order."""
    path = run_dir / ".hydra" / "starts.yaml"
    return (read_yaml(path) if path.is_file() else None) or []


def changes_of(run_dir: Path) -> dict[str, str]:
    """Dotted key -> `0.001, then 0.0001`, of what a resume changed; not of keys that follow others."""
    settings, found = settings_of(run_dir), dict[str, str]()
    for start in starts_of(run_dir):
        for key, (old, new) in start.get("changes", {}).items():
            found[key] = f"{found.get(key, old)}, then {new}"
    return {key: change for key, change in found.items() if "${" not in settings.get(key, "")}


def about(run_dir: Path) -> str:
    """`arithmetic, tiny, grpo, lr 0.0003`: task, model, rollouts, loss and rate; empty without Hydra's files."""
    if not (run_dir / ".hydra" / "hydra.yaml").is_file():
        return ""
    config, choices = read_yaml(run_dir / ".hydra" / "config.yaml"), choices_of(run_dir)
    model, source = config["model"], choices.get("rollouts", "on_policy")
    adapted = [f"LoRA rank {model['lora']['r']}"] if model.get("lora") else []
    sampled = [] if source == "on_policy" else [f"rollouts {source}"]
    name = Path(str(model["train_id"])).name if model.get("train_id") else choices["model"]
    rate = f"lr {float(config['train']['lr']):g}"
    return ",  ".join([choices["task"], name, *adapted, *sampled, choices["train/loss"], rate])
