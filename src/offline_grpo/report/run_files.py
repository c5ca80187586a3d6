"""Reads what Hydra stored about a run in its folder: the choices and values that it was composed of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from offline_grpo.errors import GrpoError

T = TypeVar("T")
RESTORE = "restore it from a copy of the run folder"


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        GrpoError: it cannot be read.
    """
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # no UTF-8 and no date are ValueErrors
        raise GrpoError(f"{path}: cannot be read ({' '.join(str(error).split())}); {RESTORE}") from error


def read_part(path: Path, take: Callable[[Any], T]) -> T:
    """What `take` finds in the content of a YAML file.

    Raises:
        GrpoError: the file cannot be read, is empty or lacks what is looked for.
    """
    content = read_yaml(path)
    try:
        return take(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = "is empty" if content is None else f"is incomplete ({error!r})"
        raise GrpoError(f"{path}: {what}; {RESTORE}") from error


def about(run_dir: Path) -> str:
    """`arithmetic, tiny, grpo, lr 0.0003`: task, model, source of rollouts if they are not sampled on policy, loss and learning rate; empty
    if the run was not started by Hydra.

    Raises:
        GrpoError: a file of Hydra's is damaged.
    """
    folder = run_dir / ".hydra"
    if not (folder / "config.yaml").is_file() or not (folder / "hydra.yaml").is_file():
        return ""
    name, adapted, rate = read_part(folder / "config.yaml", _of_config)
    task, option, sampled, loss = read_part(folder / "hydra.yaml", _of_choices)
    return ",  ".join([task, name or option, *adapted, *sampled, loss, rate])


def _of_config(config: Any) -> tuple[str | None, list[str], str]:
    """Model, adapters and learning rate."""
    model, lora = config["model"], config["model"].get("lora")
    name = Path(str(model["train_id"])).name if model.get("train_id") else None
    return name, [f"LoRA rank {lora['r']}"] if lora else [], f"lr {float(config['train']['lr']):g}"


def _of_choices(record: Any) -> tuple[str, str, list[str], str]:
    """Task, option of the model, source of rollouts and loss."""
    choices = record["hydra"]["runtime"]["choices"]
    source = choices.get("rollouts", "on_policy")
    sampled = [] if source == "on_policy" else [f"rollouts {source}"]
    return str(choices["task"]), str(choices["model"]), sampled, str(choices["train/loss"])
