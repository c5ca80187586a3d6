"""Reads what Hydra stored about a run in its folder: the choices and values that it was composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from offline_grpo.errors import GrpoError
from offline_grpo.redaction import flat, redacted

T = TypeVar("T")
WITHOUT_EFFECT = ("resume", "logger", "samples", "num_threads", "cache_dir")
"""Top-level keys that change nothing that is learnt; they do not count when configurations are compared."""
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


def overrides_of(run_dir: Path) -> dict[str, str]:
    """`["train.lr=1e-6", "task=sat"]` -> {"train.lr": "1e-6", "task": "sat"}; `~key` deletes and has no value.

    Raises:
        GrpoError: the file cannot be read.
    """
    overrides = read_part(run_dir / ".hydra" / "overrides.yaml", lambda found: list(found or []))
    return {key: value for key, _, value in (str(override).partition("=") for override in overrides)}


def settings_of(run_dir: Path) -> dict[str, str]:
    """The stored configuration by dotted keys, interpolations as they are. A key that is null is left out, as one that
    did not exist yet.

    Raises:
        GrpoError: the file cannot be read.
    """
    stored = read_part(run_dir / ".hydra" / "config.yaml", lambda config: flat(redacted({**config})))
    return {key: str(value) for key, value in stored.items() if value is not None}


def changed_on_the_way(run_dir: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Dotted key -> `0.001 until iteration 6, then 0.0001`, of what a resume changed; without keys that only follow
    another one.

    Args:
        settings: see `settings_of`.

    Raises:
        GrpoError: the file cannot be read.
    """
    path = run_dir / ".hydra" / "starts.yaml"
    changes = read_part(path, _of_starts) if path.is_file() else {}
    return {key: text for key, text in changes.items() if "${" not in settings.get(key, "")}


def _of_starts(starts: Any) -> dict[str, str]:
    kept: list[tuple[int, Mapping[str, Any]]] = []
    for start in starts or ():
        after = start.get("after_iteration", 0)
        kept = [each for each in kept if each[0] < after]  # the others are in what this start has set aside
        kept.append((after, start.get("changes", {})))
    found = dict[str, str]()
    for key in dict.fromkeys(key for _, changes in kept for key in changes):
        steps = [(after, *changes[key]) for after, changes in kept if key in changes]
        found[key] = ", ".join([*(f"{old} until iteration {after}" for after, old, _ in steps), f"then {steps[-1][2]}"])
    return found


def about(run_dir: Path) -> str:
    """`arithmetic, tiny, grpo, lr 0.0003`: task, model, source of rollouts if they are not sampled on policy, loss and
    learning rate; empty if the run was not started by Hydra.

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
