"""Reads what Hydra stored about a run in its folder: the choices and values that it was composed of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from offline_grpo.errors import GrpoError


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        GrpoError: it cannot be read.
    """
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise GrpoError(f"{path}: cannot be read ({error})") from error


def about(run_dir: Path) -> str:
    """`arithmetic, tiny, grpo, lr 0.0003`: task, model, source of rollouts if they are not sampled on policy, loss and learning rate; empty
    if the run was not started by Hydra.
    """
    folder = run_dir / ".hydra"
    if not (folder / "config.yaml").is_file() or not (folder / "hydra.yaml").is_file():
        return ""
    config, choices = read_yaml(folder / "config.yaml"), read_yaml(folder / "hydra.yaml")["hydra"]["runtime"]["choices"]
    model, lora = config["model"], config["model"].get("lora")
    name = Path(str(model["train_id"])).name if model.get("train_id") else choices["model"]
    adapted = [f"LoRA rank {lora['r']}"] if lora else []
    source = choices.get("rollouts", "on_policy")
    sampled = [] if source == "on_policy" else [f"rollouts {source}"]
    return ",  ".join([choices["task"], name, *adapted, *sampled, choices["train/loss"], f"lr {float(config['train']['lr']):g}"])
